"""Failure traces over training systems: what each would have trained, and what it would have lost."""
