"""The races, one module for each command of ``python -m bench``."""
