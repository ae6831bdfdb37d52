"""The checkpoint-restart study: cost, formats, scale, determinism and crash safety, measured on this machine."""
