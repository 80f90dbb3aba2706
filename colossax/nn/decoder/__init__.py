"""A decoder-only transformer: its layers by their configuration, and the model around them."""
