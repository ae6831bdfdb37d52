"""From a step to its samples, without any state."""
