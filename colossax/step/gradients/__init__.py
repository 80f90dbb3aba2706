"""Ways to get the gradients of a global batch."""
