"""Modules of plain Flax: names for their dims, gathers of their weights."""
