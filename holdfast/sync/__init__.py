"""Policies on when replicas talk: at every step, or when updates matter. In a ``Run``, or alone in anyone's loop."""
