"""Schedules of a pipeline as tables, and where the layers of a model are cut into stages."""
