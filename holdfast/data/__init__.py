"""The samples of each step and micro-batch, as pure functions without any state."""
