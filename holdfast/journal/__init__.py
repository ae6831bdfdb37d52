"""The journal of a run: a row of facts and logged values for each committed step, and the places they go to."""

NAME = "metrics.jsonl"  # of the file. It is here for readers, which need not import torch
