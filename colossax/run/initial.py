"""What a run starts from: a state of its own, or the parameters of a checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from colossax.checkpoint import Checkpointer, find_checkpoint, slot_of
from colossax.errors import DamagedStoreError
from colossax.run.checkpointing import RunCheckpoints
from colossax.run.prepared import Prepared
from colossax.run.progress import Screen
from colossax.sharding import param_sharding
from colossax.step.step import Step
from colossax.typing import ParamInfo, Params, TrainState

_PARAMS = "model/params"


def first_state(
    run: Prepared, checkpoints: RunCheckpoints, screen: Screen
) -> tuple[int, TrainState]:
    """Steps done and the state after them: restored, or fresh."""
    start = run.group.from_first(lambda: checkpoints.latest() if run.options.resume else None)
    if run.options.resume and (kept := _kept_on_disk(run, start, screen)) is not None:
        return kept
    if start is None:
        if run.options.resume:
            screen.note(f"{run.folder.path} holds no checkpoint yet; starting from the beginning")
        return 0, _fresh_state(run, screen)
    state = run.group.together(lambda: checkpoints.restore(start))
    screen.note(f"resumed from step {start} of {run.folder.path}")
    return start, state


def _fresh_state(run: Prepared, screen: Screen) -> TrainState:
    """The state of a new run, its parameters random or those of a checkpoint."""
    path, seed = run.config.init, run.config.seed
    if path is None:
        return run.step.init(seed)
    params = run.group.together(lambda: initial_params(path, run.step, seed))
    screen.note(f"parameters from {path}")
    return run.step.init_from(params, seed)


def _kept_on_disk(
    run: Prepared, start: int | None, screen: Screen
) -> tuple[int, TrainState] | None:
    """Steps done and the state in the disk tier's file, where it is whole and newer."""
    disk = run.step.disk
    if disk is None:
        return None
    kept = disk.latest()
    if kept is None and disk.has_full_state and disk.path.exists():
        screen.note(f"'{disk.path}' holds no whole state; resuming from the last checkpoint")
    if kept is None or kept <= (start or 0):
        return None
    try:
        state = disk.restore()
    except DamagedStoreError as problem:
        screen.note(f"{problem}; resuming from the last checkpoint")
        return None
    screen.note(f"resumed from step {kept}, which {disk.path} holds")
    return kept, state


def initial_params(path: str, step: Step, seed: int = 0) -> Params:
    """A checkpoint's parameters in the dtype and layout of the step.

    Each device reads its own shards, and host memory what lives there. The checkpoint may be of the
    model without `colossax.nn.with_weights`: what that made a part of another weight is found where
    it stood before, and parts that are new are drawn.

    Args:
        path: Folder of a run, of checkpoints, or of one step.
        step: Whose parameters they become.
        seed: Of what is drawn, as for `Step.init`.

    Raises:
        CheckpointError: Records are missing, of another model, or damaged.
    """
    checkpoint = find_checkpoint(path)
    dtype = step.bound.plan.precision.params
    records = checkpoint.records()

    def is_new(info: ParamInfo) -> bool:
        return info.stood_at == "" and f"{_PARAMS}/{info.own_path}" not in records

    infos, structure = jax.tree.flatten(step.spec.infos)
    wants = [
        (
            slot_of(_stored(info, records), _PARAMS, dtype=info.at_rest(dtype)),
            param_sharding(step.bound, "params", info),
        )
        for info in infos
        if not is_new(info)
    ]
    read = iter(Checkpointer(checkpoint.directory).restore(checkpoint.step, wants, convert=True))
    drawn = iter(())
    if any(map(is_new, infos)):
        drawn = iter(jax.tree.leaves(step.fresh_params(seed, only=is_new)))
    arrays = [next(drawn) if is_new(info) else next(read) for info in infos]
    return jax.tree.unflatten(structure, arrays)


def _stored(info: ParamInfo, records: Mapping[str, Any]) -> ParamInfo:
    """The parameter with the path under which the checkpoint has it."""
    if not info.stood_at or f"{_PARAMS}/{info.own_path}" in records:
        return info
    return dataclasses.replace(info, path=info.stood_at)
