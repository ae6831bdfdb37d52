"""Measures the costs of a run's layers and the speed of its links, without training."""
