"""The life of a run: from its folder to its last checkpoint."""
