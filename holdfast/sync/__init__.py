"""When replicas talk: at every step, or only when their updates matter. In a ``Run``, or alone in anyone's loop."""
