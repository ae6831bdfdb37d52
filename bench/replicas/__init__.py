"""Methods, tasks and workers of ``bench sync``."""
