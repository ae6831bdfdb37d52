"""Contestants of the race of data sets that are slow to read."""
