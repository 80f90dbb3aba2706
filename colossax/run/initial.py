"""What a run starts from: a state of its own, or the parameters of checkpoints."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from colossax.checkpoint import Checkpointer, RecordReader, find_checkpoint, slot_of
from colossax.errors import DamagedStoreError, InputError
from colossax.run.checkpointing import MODEL, RunCheckpoints
from colossax.run.options import Init, Source
from colossax.run.prepared import Prepared
from colossax.run.progress import Screen
from colossax.sharding import param_sharding
from colossax.step.step import Step
from colossax.typing import Params, TrainState

_PARAMS = "params"


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
    """The state of a new run, its parameters random or of checkpoints."""
    init, seed = run.config.init, run.config.seed
    if init is None:
        return run.step.init(seed)
    origins = run.group.together(lambda: origins_of(init, run.step.spec.model_names))
    params = run.group.together(lambda: initial_params(origins, run.step, seed))
    for name, origin in origins.items():
        screen.note(f"{'' if name == MODEL else f'{name}: '}parameters from {origin}")
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """A model in a checkpoint.

    Attributes:
        path: As it was given.
        checkpoint: What is there.
        model: Name among its records; `MODEL` where it is alone.
    """

    path: str
    checkpoint: RecordReader
    model: str

    def __str__(self) -> str:
        return self.path if self.model == MODEL else f"'{self.model}' of {self.path}"


def origins_of(init: Init, names: Sequence[str]) -> dict[str, Origin]:
    """Which checkpoint's model each model of a run starts from; none for what begins random.

    Args:
        init: See `RunConfig`.
        names: Of the run's models; empty for one without a name, which is `MODEL` in the result.

    Raises:
        InputError: It does not fit the models of the run, or of the checkpoint.
        CheckpointError: There is no finished step, or it is damaged.
    """
    if isinstance(init, Mapping):
        _check_names(init, names)
        return {name: _origin(source, name) for name, source in init.items()}
    if not names:
        return {MODEL: _origin(init, MODEL)}
    path = init[0] if isinstance(init, tuple) else init
    held = _models_of(find_checkpoint(path))
    if isinstance(init, tuple) or not set(names) <= set(held):
        raise InputError(
            f"init: the run trains {_listed(names)}, and '{path}' holds {_listed(held)}; say by"
            f" name what starts from it, as in {{'{names[0]}': {init!r}}}"
        )
    return {name: _origin(path, name) for name in names}


def _check_names(init: Mapping[str, Source], names: Sequence[str]) -> None:
    unknown = sorted(set(init) - set(names))
    if unknown or not init:
        raise InputError(
            f"init: it names {_listed(unknown) if unknown else 'no model'}, and the run trains"
            f" {_listed(names or (MODEL,))}; give"
            f" {'a checkpoint by the name of each' if names else 'a checkpoint without a name'}"
        )


def _origin(source: Source, name: str) -> Origin:
    """The model that is named in the checkpoint; else that of this name, or the only one."""
    path, asked = source if isinstance(source, tuple) else (source, None)
    checkpoint = find_checkpoint(path)
    held = _models_of(checkpoint)
    wanted = asked or (MODEL if held == (MODEL,) else name)
    if wanted not in held:
        raise InputError(
            f"init: '{path}' holds {_listed(held)} and not {_listed((wanted,))}; give one of its"
            f" models, as in ('{path}', '{held[0] if held else MODEL}')"
        )
    return Origin(path=path, checkpoint=checkpoint, model=wanted)


def _models_of(checkpoint: RecordReader) -> tuple[str, ...]:
    records = (record.split("/") for record in checkpoint.records())
    return tuple(sorted({model for model, kind, *_ in records if kind == _PARAMS}))


def _listed(names: Sequence[str]) -> str:
    quoted = ["one model without a name" if name == MODEL else f"'{name}'" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted or ["none"])


def initial_params(origins: Mapping[str, Origin], step: Step, seed: int = 0) -> Params:
    """Parameters of checkpoints in the dtype and layout of the step, and random ones beside them.

    Each device reads its own shards, and host memory what lives there.

    Args:
        origins: See `origins_of`.
        step: Whose parameters they become.
        seed: Of those of models without an origin, which are as in `step.init(seed)`.

    Raises:
        CheckpointError: Records are missing, of another model, or damaged.

    Cost: the random parameters of all models are made where there are any.
    """
    if MODEL in origins and not step.spec.model_names:
        return _read(origins[MODEL], step, step.spec.infos)
    random = set(step.spec.model_names) - set(origins)
    fresh = step.init_params(seed) if random else {}
    params = {name: fresh.pop(name) for name in random}
    fresh.clear()  # before others are read in place of them
    return params | {
        name: _read(origin, step, step.spec.infos[name]) for name, origin in origins.items()
    }


def _read(origin: Origin, step: Step, infos: Any) -> Params:
    dtype = np.dtype(step.bound.plan.precision.params)
    leaves, structure = jax.tree.flatten(infos)
    prefix = f"{origin.model}/{_PARAMS}"
    wants = [
        (slot_of(info, prefix, dtype=dtype), param_sharding(step.bound, "params", info))
        for info in leaves
    ]
    checkpoint = origin.checkpoint
    arrays = Checkpointer(checkpoint.directory).restore(checkpoint.step, wants, convert=True)
    return jax.tree.unflatten(structure, arrays)
