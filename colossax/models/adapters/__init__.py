"""Adapters in checkpoints and in the folders of `peft`."""
