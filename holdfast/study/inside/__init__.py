"""Code that runs in a framework's own interpreter; it may import the standard library, numpy and that framework."""
