"""Layers whose parameters or optimizer state are in host memory or on disk."""
