"""What checkpoints say of a model."""
