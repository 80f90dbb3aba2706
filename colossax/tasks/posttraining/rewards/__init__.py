"""Rewards of answers by a plain Python function, in processes of its own."""
