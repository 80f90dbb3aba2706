"""One training run of a configuration, in a folder of its own that does not outlive it."""

import tempfile
from pathlib import Path
from typing import Any

import common

from colossax.cli.train import run_config
from colossax.processes import Group
from colossax.run import RunFolder, RunOptions, train
from colossax.run.records import read_records
from colossax.tasks import TrainConfig, task_of


def trained(config: TrainConfig) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, float]]:
    """What the run ended with, its records, and what `common.Clock` tells of it."""
    clock = common.Clock()
    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(out=f"{folder}/run", trackers=("json",))
        group = Group(None, {})
        outcome = train(task_of(config, group), run_config(config), options, group)
        records = list(read_records(RunFolder(path=Path(folder) / "run").metrics))
    return dict(outcome.final), records, clock.read()


def validated(config: TrainConfig, *, points: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run ended with, and its `{seed, curve, final, cpu_s}`.

    Args:
        config: Of the run; it is validated `points` times and saved at its end alone.
        points: Of the curve, `[step, validation loss]`.
    """
    often = max(config.steps // points, 1)
    config = config.replace(validate_every=often, checkpoint_every=config.steps)
    ended, records, spent = trained(config)
    name = "validation_loss"
    curve = [[record["step"], record[name]] for record in records if name in record]
    told = {"seed": config.seed, "curve": curve, "final": curve[-1][1], "cpu_s": spent["cpu_s"]}
    return ended, told
