"""Rules of the simulated systems: a few pure decisions each, called by :mod:`holdfast.simulate.course`."""
