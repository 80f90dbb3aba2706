"""Runs on text with a tenth of a recipe's work, in this process, one mesh after another."""

import dataclasses

import numpy as np

from colossax import Plan
from colossax.processes.group import Group
from colossax.run import RunConfig, RunOptions, train
from colossax.tasks import TrainConfig, started_from, task_of
from tests.launching import metrics, write_text


def changed(config, part, **changes):
    """The recipe's configuration with other fields in one of its parts."""
    return config.replace(**{part: dataclasses.replace(getattr(config, part), **changes)})


def smaller(config, sizes):
    """With the fields that `sizes` has by part."""
    for part, fields in sizes.items():
        config = changed(config, part, **fields)
    return config


def ran(config, out, *, resume=False, task=None):
    """What a run's final record says; as the command line does it, but in this process."""
    names = [field.name for field in dataclasses.fields(RunConfig) if hasattr(config, field.name)]
    how = RunConfig(**{name: getattr(config, name) for name in names})
    if isinstance(config, TrainConfig):
        how = dataclasses.replace(how, init=started_from(config))
    options = RunOptions(out=str(out), resume=resume, trackers=("json",))
    return train(task or task_of(config), how, options, Group(None, {})).final


def check_resumed(config, meshes, folder, **data):
    """Two steps on each mesh after another, in `parts`, are those of a run that nobody touched."""
    steps = 2 * len(meshes)
    whole = config.replace(steps=steps, validate_every=2, checkpoint_every=2)
    made = config.data.images or config.data.audio
    read = {} if made else {"path": str(write_text(folder / "text"))}
    whole = changed(whole, "data", **read, **data)
    whole = changed(whole, "optimizer", schedule_steps=steps)
    ran(whole, folder / "whole")
    for number, mesh in enumerate(meshes):
        part = whole.replace(steps=2 * number + 2, plan=Plan(mesh=mesh))
        ran(part, folder / "parts", resume="auto")
    losses, parts = (
        np.array([[loss or 0, held_out or 0] for _, loss, held_out in metrics(folder / name)])
        for name in ("whole", "parts")
    )
    np.testing.assert_allclose(parts, losses, rtol=2e-5)
