"""The recipes there are, told; and tasks of one's own, run as asked."""

import dataclasses
import json

from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.output import put
from colossax.recipes import OwnTask, described


def list_recipes(*, as_json: bool) -> int:
    """Tell the recipes of the library and return the exit code."""
    for name, line in described().items():
        one = json.dumps({"recipe": name, "summary": line}) if as_json else f"{name:14}{line}"
        put(f"{one}\n")
    return 0


def run_as_asked(own: OwnTask, given: list[Override]) -> OwnTask:
    """A task with how it is run overridden; what it is, its recipe alone says.

    Without a `RunConfig` of its own it has one of a single step.
    """
    from colossax.run import RunConfig

    config = apply_overrides(own.config or RunConfig(steps=1), given)
    init = dict(given).get("init")
    if init is not None:
        config = dataclasses.replace(config, init=None if init.lower() == "none" else init)
    return dataclasses.replace(own, config=config)
