"""The demo: a byte-level GPT on Python's own source, with workers killed at random."""
