"""Parts of ``python -m bench scale``: how costs grow with the number of workers."""
