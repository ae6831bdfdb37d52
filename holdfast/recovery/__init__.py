"""Making a generation whole again after a loss: the layout, copies from replicas, replay from the log, checkpoints."""
