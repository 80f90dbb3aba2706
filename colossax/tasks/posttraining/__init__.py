"""Objectives on what a model says of answers that are there: preferences, with and without pairs."""
