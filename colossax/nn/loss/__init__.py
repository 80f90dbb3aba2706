"""Losses of logits that are never whole."""
