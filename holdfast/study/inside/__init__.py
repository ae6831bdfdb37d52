"""What runs in a framework's own interpreter: standard library, numpy and that framework, nothing else."""
