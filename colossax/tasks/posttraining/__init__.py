"""Objectives on what a model says of answers that are there: preferences, in pairs or without."""
