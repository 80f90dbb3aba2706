"""Layers one after another: what they are stacked as, and how they are called."""
