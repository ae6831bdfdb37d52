"""Races against peers, in one run, as ratios: ``python -m bench`` in the repository's root. Not part of the package."""
