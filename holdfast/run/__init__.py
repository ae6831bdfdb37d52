"""``holdfast.Run`` and what belongs to it: settings, saving, results."""
