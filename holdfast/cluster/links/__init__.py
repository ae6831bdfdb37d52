"""Connections between workers: one hub a process, links that are made when they are first needed."""
