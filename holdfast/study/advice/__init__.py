"""What follows from a study for whoever ran it: sentences, each with the rows that it rests on."""

from holdfast.study.advice.advise import advise

__all__ = ["advise"]
