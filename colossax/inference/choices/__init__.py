"""Evaluation by choices: what is asked of an engine, and what its scores say."""
