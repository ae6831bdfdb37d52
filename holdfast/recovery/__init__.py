"""Committing operations exactly once, and making a generation whole again after a loss."""
