"""Plans for serving: most tokens a second of an engine that fits, found like plans for training."""
