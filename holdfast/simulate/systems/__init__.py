"""The systems and their rules: each a few pure decisions that :mod:`holdfast.simulate.course` follows."""
