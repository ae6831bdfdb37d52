"""Looking at a run: a reader of its files, ``holdfast top``, the live page, and metrics. It never touches training."""
