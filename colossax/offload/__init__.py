"""State larger than a device: memory kinds, steps that stream it, and the disk below the host."""
