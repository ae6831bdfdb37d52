"""What a study found, for people and for machines."""

from holdfast.study.report.write import summary, write

__all__ = ["summary", "write"]
