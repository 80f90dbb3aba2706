"""Matrices that are frozen and kept in codes of four or eight bits."""
