"""What a run starts from: a state of its own, or the parameters of checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from colossax.checkpoint import slot_of
from colossax.documents import parse_json
from colossax.errors import (
    CheckpointError,
    DamagedCheckpointError,
    DamagedStoreError,
    InputError,
    OffloadError,
)
from colossax.models.adapters.quantising import read_with_codes
from colossax.nn.decoder.head import OWN_HEAD
from colossax.processes.group import Group
from colossax.run.checkpointing import RunCheckpoints
from colossax.run.origins import Origin
from colossax.run.prepared import Prepared
from colossax.run.progress import Screen
from colossax.run.run_dir import first_difference
from colossax.run.sources import StatefulBatches
from colossax.run.unfinished import Unfinished, unfinished
from colossax.sharding import param_sharding
from colossax.step.offloaded.disk import DiskTier
from colossax.step.saving.records import MODEL
from colossax.step.step import Step
from colossax.typing import ParamInfo, Params, TrainState


def first_state(
    run: Prepared, checkpoints: RunCheckpoints, screen: Screen
) -> tuple[int, TrainState, Unfinished | None]:
    """Steps done and the state after them: restored, or fresh; what was left undone of the last.

    Raises:
        InputError: The run was begun with a state of later steps, whose batches it cannot have.
        CheckpointError: See `RunCheckpoints.restore`.
    """
    start, state, left = _found_state(run, checkpoints, screen)
    if start < run.begun:
        raise InputError(
            f"resume: the run in {run.folder.path} was begun after step {run.begun}, and there is a"
            f" state after step {start} alone to go on from; give one after step {run.begun}, or"
            " start a new run in another folder"
        )
    return start, state, left


def _found_state(
    run: Prepared, checkpoints: RunCheckpoints, screen: Screen
) -> tuple[int, TrainState, Unfinished | None]:
    start = run.group.from_first(lambda: _latest(checkpoints) if run.options.resume else None)
    if run.options.resume and (kept := _kept_on_disk(run, start, screen)) is not None:
        return kept
    if start is None:
        if run.options.resume:
            screen.note(f"{run.folder.path} holds no checkpoint yet; starting from the beginning")
        return *_fresh_state(run, screen), None
    if run.state is not None:  # it makes room for the one on disk
        _make_room(run)
    base = run.group.together(lambda: base_params(run))
    start, state = _restored(run.group, checkpoints, start, base)
    screen.note(f"resumed from step {start} of {run.folder.path}")
    if not run.folder.file.is_file():
        screen.note(f"{run.folder.file} was missing; checkpoints say what it said")
    return start, state, None


def _latest(checkpoints: RunCheckpoints) -> int | None:
    """Of what is whole; what is not is out of the way then."""
    checkpoints.set_broken_aside()
    return checkpoints.latest()


def _make_room(run: Prepared) -> None:
    """Give up the arrays of a given state, but those that checkpoints leave out."""
    assert run.state is not None
    kept = jax.tree.map(
        lambda info, leaf: leaf if info.of_base else None, run.step.spec.infos, run.state["params"]
    )
    kept = {id(leaf) for leaf in jax.tree.leaves(kept)}
    for leaf in jax.tree.leaves(run.state):
        if id(leaf) not in kept:
            leaf.delete()


def base_params(run: Prepared) -> Params | None:
    """Parameters of the model that an adapter is of, None in place of others; None: there is none.

    Raises:
        CheckpointError: They cannot be read.
    """
    infos = run.step.spec.infos
    if not any(info.of_base for info in jax.tree.leaves(infos)):
        return None
    if run.state is not None:
        return run.state["params"]
    return initial_params(run.origins(), run.step, run.config.seed, only=lambda info: info.of_base)


def _restored(
    group: Group, checkpoints: RunCheckpoints, start: int, base: Params | None = None
) -> tuple[int, TrainState]:
    """The latest state that can be read, from a step on; damaged ones after it are moved aside.

    Raises:
        CheckpointError: None can; the last one that is there stays.
    """
    while True:
        found = group.together(lambda at=start: _unless_damaged(checkpoints, at, base))
        try:
            group.together(lambda one=found: _raised(one))
        except InputError as problem:
            damage = str(problem)
        else:
            return start, found
        earlier = group.from_first(lambda at=start: checkpoints.before(at))
        if earlier is None:
            raise CheckpointError(damage)
        reason = damage.rpartition("; ")[0]  # without its remedy, which is taken here
        group.from_first(lambda at=start, why=reason: checkpoints.set_aside(at, why))
        start = earlier


def _unless_damaged(checkpoints: RunCheckpoints, start: int, base: Params | None) -> Any:
    """The state, or why it cannot be read: another process may be able to."""
    try:
        return checkpoints.restore(start, base)
    except DamagedCheckpointError as problem:
        return problem


def _raised(found: Any) -> None:
    if isinstance(found, DamagedCheckpointError):
        raise found


def _fresh_state(run: Prepared, screen: Screen) -> tuple[int, TrainState]:
    """Steps done and the state of a new run: as given, or random, or parameters of checkpoints."""
    init, seed = run.config.init, run.config.seed
    if run.state is not None:
        return int(run.state["step"]), run.state
    if init is None:
        return 0, run.step.init(seed)
    origins = run.group.together(run.origins)
    params = run.group.together(lambda: initial_params(origins, run.step, seed))
    for name, origin in origins.items():
        screen.note(f"{'' if name == MODEL else f'{name}: '}parameters from {origin}")
    return 0, run.step.init_from(params, seed)


def _kept_on_disk(
    run: Prepared, start: int | None, screen: Screen
) -> tuple[int, TrainState, Unfinished] | None:
    """Steps done and the state in the disk tier's file, where it is whole and newer.

    Callbacks go on from checkpoints alone: the file is committed before they are called.
    """
    disk = run.step.disk
    if disk is None:
        return None
    kept = disk.latest()
    if kept is None and disk.has_full_state and disk.path.exists():
        screen.note(f"'{disk.path}' holds no whole state; resuming from the last checkpoint")
    if kept is None or kept <= (start or 0):
        return None
    check_owner(disk, run.identity)
    if not all(isinstance(one, StatefulBatches) for one in run.task.callbacks):
        screen.note(
            f"'{disk.path}' holds step {kept}, and nothing of the callbacks; resuming from the last"
            " checkpoint"
        )
        return None
    try:
        state = disk.restore()
    except DamagedStoreError as problem:
        screen.note(f"{problem}; resuming from the last checkpoint")
        return None
    screen.note(f"resumed from step {kept}, which {disk.path} holds")
    least = run.plan.precision.loss_scale.minimum
    return kept, state, unfinished(run.folder.metrics, disk.metrics(), kept, least)


def check_owner(disk: DiskTier, asked: dict[str, Any]) -> None:
    """Refuse the file of another run.

    Raises:
        OffloadError: It says that it is; one that does not say is taken.
    """
    if not (stored := disk.found_owner):
        return
    if (difference := first_difference(parse_json(stored), asked)) is not None:
        field, there, here = difference
        raise OffloadError(
            f"disk store '{disk.path}' is of another run: {field} is {there} there and {here} here;"
            " move it away, to go on from the last checkpoint"
        )


def initial_params(
    origins: Mapping[str, Origin],
    step: Step,
    seed: int = 0,
    *,
    only: Callable[[ParamInfo], bool] = lambda info: True,
) -> Params:
    """Parameters of checkpoints in the dtype and layout of the step, and random ones beside them.

    Each device reads its own shards, and host memory what lives there. A checkpoint may be of the
    model without `colossax.nn.with_weights`: what that made a part of another weight is found where
    it stood before, and parts that are new are drawn: so is a head of `colossax.nn.with_new_head`.

    Args:
        origins: See `origins_of`.
        step: Whose parameters they become.
        seed: Of what is drawn, as for `Step.init`: new parts, and models without an origin.
        only: Which are wanted; None stands in place of the others.

    Raises:
        CheckpointError: Records are missing, of another model, or damaged.
    """
    infos, structure = jax.tree.flatten(step.spec.infos)

    def is_drawn(info: ParamInfo) -> bool:
        origin = origins.get(info.model or MODEL)
        return only(info) and (origin is None or origin.holding(info).lacks(info))

    arrays: dict[int, Any] = {}
    for name, origin in origins.items():
        stored = {
            i: info
            for i, info in enumerate(infos)
            if (info.model or MODEL) == name and only(info) and not is_drawn(info)
        }
        own = [info for info in infos if (info.model or MODEL) == name]
        origin.check_all_read(own)
        head = [info for info in own if info.own_path.startswith(f"{OWN_HEAD}/")]
        new_head = any(origin.holding(info).lacks(info) for info in head)
        if new_head:
            origin.check_but_head(own)
        every = not (origin.base or new_head) and all(map(only, own))
        read = _read(origin, step, list(stored.values()), exact=every)
        arrays.update(zip(stored, read, strict=True))
    if any(map(is_drawn, infos)):
        drawn = jax.tree.leaves(step.fresh_params(seed, only=is_drawn))
        arrays.update(
            zip([i for i, info in enumerate(infos) if is_drawn(info)], drawn, strict=True)
        )
    return jax.tree.unflatten(structure, [arrays.get(i) for i in range(len(infos))])


def _read(origin: Origin, step: Step, infos: Sequence[ParamInfo], *, exact: bool) -> Sequence[Any]:
    """These parameters of an origin's model; those of an adapter, and of its base."""
    dtype, found = step.bound.plan.precision.params, dict[int, Any]()
    for holder in filter(None, (origin, origin.base)):
        own = [i for i, info in enumerate(infos) if origin.holding(info) is holder]
        wants = [
            (
                slot_of(holder.stored(info), holder.prefix, dtype=info.at_rest(dtype)),
                param_sharding(step.bound, "params", info),
            )
            for info in map(infos.__getitem__, own)
        ]
        arrays = read_with_codes(
            holder.checkpoint,
            holder.prefix,
            [infos[i] for i in own],
            wants,
            step.bound,
            exact=exact,
        )
        found.update(zip(own, arrays, strict=True))
    return [found[i] for i in range(len(infos))]
