"""Narrow matrices that learn beside frozen ones."""
