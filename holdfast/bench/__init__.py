"""Races against peers, in one run, as ratios. Part of the package, because ``holdfast bench`` is for users."""
