"""Collectives, run and measured."""
