"""The study's pictures: narrow enough for a phone, and nothing in them is told by colour alone."""

from holdfast.study.plots.pictures import draw

__all__ = ["draw"]
