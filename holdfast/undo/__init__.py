"""Undoing an update: rules for each optimizer, the ledger of what was changed, eager updates."""
