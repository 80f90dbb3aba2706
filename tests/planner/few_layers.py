"""Runs of recipes with few layers, as wide as they are."""

import dataclasses

from colossax.recipes import recipe


def few_layers(name, layers, rows):
    """With so many layers, and so many rows a step."""
    config = recipe(name)
    return config.replace(
        model=dataclasses.replace(config.model, layers=layers),
        data=dataclasses.replace(config.data, global_batch=rows),
    )
