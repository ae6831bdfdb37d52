"""One training step: layers, gradients along a fixed tree, clipping, the update."""
