"""One kill and its recovery, measured, for ``bench replay``."""
