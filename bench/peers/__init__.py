"""Peers that ``python -m bench`` races against; each module is a program of its own."""
