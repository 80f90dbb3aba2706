"""A training state as records of a checkpoint, and back onto any mesh."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from colossax.checkpoint import ArraySlot, Checkpointer, slot_of
from colossax.errors import CheckpointError
from colossax.optim import ByModel
from colossax.step.step import Step
from colossax.typing import ParamInfo, TrainState

MODEL = "model"
"""Name of a model that is alone, and of what belongs to no one model."""


def state_slots(step: Step) -> TrainState:
    """The state's structure with an `ArraySlot` for each array.

    Parameters are `<model>/params/<path>`, what mirrors them in the optimizer's state is
    `<model>/optimizer/<field>/<path>`, by layer of the whole stack: neither segments nor mesh show.
    A model that is alone is `model`; so a named one is stored as if it were alone.
    """
    abstract = step.abstract
    return {
        "params": jax.tree.map(
            lambda info, leaf: slot_of(
                info, f"{info.model or MODEL}/params", dtype=np.dtype(leaf.dtype)
            ),
            step.spec.infos,
            abstract["params"],
        ),
        "opt_state": _optimizer_slots(step),
        "variables": _plain_slots(abstract["variables"], f"{MODEL}/variables"),
        **{
            name: _plain_slots(abstract[name], f"{MODEL}/state/{name}")
            for name in ("step", "rng", "skipped")
        },
    }


@dataclasses.dataclass(frozen=True)
class _Mark:
    """A leaf of the optimizer's state with the parameter it mirrors."""

    leaf: Any
    info: ParamInfo | None


def _disk_slots(step: Step) -> list[ArraySlot]:
    """Of the optimizer state on disk, in the order of its part."""
    if step.disk is None:
        return []
    slots = jax.tree.leaves(_optimizer_slots(step, on_disk=True))
    return [slots[j] for j in step.disk.part.slots]


def _optimizer_slots(step: Step, *, on_disk: bool = False) -> Any:
    depths = {
        (info.path, info.first_layer): len(path)
        for path, info in jax.tree_util.tree_flatten_with_path(step.infos)[0]
    }
    marks = step.layout.map_moments(_Mark, lambda leaf: _Mark(leaf, None), on_disk=on_disk)
    apart = isinstance(step.optimizer, ByModel)

    def slot(path: tuple, mark: _Mark) -> ArraySlot:
        leaf, info = mark.leaf, mark.info
        model = _key_name(path[0]) if apart else MODEL
        path = path[apart:]
        if info is None or (info.stacked and leaf.shape[:1] != info.shape[:1]):
            return _plain_slot(leaf, f"{model}/optimizer", path)
        field = path[: len(path) - depths[info.path, info.first_layer] + apart]
        prefix = "/".join([f"{info.model or model}/optimizer", *map(_key_name, field)])
        return slot_of(info, prefix, shape=leaf.shape, dtype=np.dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(
        slot, marks, is_leaf=lambda leaf: isinstance(leaf, _Mark)
    )


def _plain_slots(tree: Any, prefix: str) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _plain_slot(leaf, prefix, path), tree
    )


def _plain_slot(leaf: Any, prefix: str, path: tuple) -> ArraySlot:
    name = "/".join([prefix, *map(_key_name, path)])
    return ArraySlot(name=name, shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype))


def _key_name(key: Any) -> str:
    """`DictKey('mu')`, `GetAttrKey('mu')`, `SequenceKey(0)` as `mu`, `mu`, `0`."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"a state with keys of type {type(key).__name__} cannot be saved")


def _on_host(step: Step) -> bool:
    """Whether any of the state lives in host memory or on disk."""
    kinds = {sharding.memory_kind for sharding in jax.tree.leaves(step.shardings)}
    return "pinned_host" in kinds or step.disk is not None


def _position(done: int) -> dict[str, int]:
    """Where the data goes on after `done` steps: batch g is rows g * global_batch and following."""
    return {"batch": done}


Beside = Callable[[], tuple[dict[str, Any], list[tuple[ArraySlot, jax.Array]]]]
"""Documents and arrays that a checkpoint holds beside the state."""


class RunCheckpoints:
    """The checkpoints of a run: a whole state each, and what is needed to go on or to serve it."""

    def __init__(
        self,
        folder: Path,
        step: Step,
        *,
        keep: int,
        documents: dict[str, Any],
        report: Callable[[str], None],
        beside: Beside = lambda: ({}, []),
    ):
        """Name the folder; nothing is written yet.

        Args:
            folder: Of the checkpoints.
            step: Whose states they are.
            keep: How many to keep.
            documents: JSON values stored with each, beside the data position.
            report: Told in one sentence of a checkpoint that could not be written.
            beside: Asked at each save for more that belongs to it.
        """
        self._step = step
        self._slots = state_slots(step)
        self._on_disk = _disk_slots(step)
        self._documents = documents
        self._report = report
        self._beside = beside
        # A copy of what host memory holds, to go on beside the writing, is room that nobody has.
        self._checkpointer = Checkpointer(folder, keep=keep, asynchronous=not _on_host(step))

    def save(self, state: TrainState, done: int) -> None:
        """Start saving the state after `done` steps; it may be donated when this returns.

        It is written when this returns where any of the state lives in host memory or on disk, and
        while training goes on elsewhere. A failure to write, of this save or of an earlier one, is
        reported, and training goes on.

        Raises:
            OffloadError: The optimizer's state cannot be read from disk.
        """
        slots = jax.tree.leaves(self._slots)
        more, arrays = self._beside()
        documents = {**self._documents, **more, "position": _position(done)}
        pairs: list[Any] = [*zip(slots, jax.tree.leaves(state), strict=True), *arrays]
        if self._step.disk is not None:
            pairs += zip(self._on_disk, self._step.disk.sources(), strict=True)
        self._checkpointer.save(done, pairs, documents)
        self._tell()

    def latest(self) -> int | None:
        """Steps done at the latest checkpoint."""
        return self._checkpointer.latest()

    def restore(self, done: int) -> TrainState:
        """The state after `done` steps, laid out by the step's plan.

        Raises:
            CheckpointError: It is damaged, of another model or optimizer, or holds a data position
                that is not that of this step.
        """
        self._check_position(done)
        slots, structure = jax.tree.flatten(self._slots)
        shardings = jax.tree.leaves(self._step.shardings)
        wants = list(zip(slots, shardings, strict=True))
        disk = self._step.disk
        arrays = self._checkpointer.restore(done, wants, exact=disk is None)
        state = jax.tree.unflatten(structure, arrays)
        if disk is not None:
            disk.fill(state, lambda layer: self._restored_row(done, layer))
        return state

    def holds(self, done: int) -> bool:
        """Whether there is one after `done` steps."""
        return done in self._checkpointer.steps()

    def document(self, done: int, name: str) -> Any:
        """A JSON value of the checkpoint after `done` steps; None where it has none."""
        return self._checkpointer.documents(done).get(name)

    def arrays(self, done: int, wants: Sequence[tuple[ArraySlot, Sharding]]) -> list[jax.Array]:
        """Arrays that it has beside the state, see `beside`, each sharded as asked."""
        return self._checkpointer.restore(done, wants, exact=False)

    def _check_position(self, done: int) -> None:
        """Refuse to go on with other data than the run would have seen next."""
        position = self._checkpointer.documents(done).get("position")
        if position != _position(done):
            raise CheckpointError(
                f"checkpoint '{self._checkpointer.directory}' step {done}: found the data position"
                f" {position}, and after {done} steps it is {_position(done)}; resume from another"
                " checkpoint, by deleting this one"
            )

    def _restored_row(self, done: int, layer: int) -> list[jax.Array]:
        """Optimizer state of one layer on disk."""
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        rows = [
            dataclasses.replace(slot, first=(slot.first or 0) + layer, layers=None)
            for slot in self._on_disk
        ]
        return self._checkpointer.restore(done, [(slot, where) for slot in rows], exact=False)

    def finish(self) -> None:
        """Wait until everything is on disk, or reported not to be."""
        try:
            self._checkpointer.close()
        except CheckpointError as problem:
            self._report(str(problem))

    def _tell(self) -> None:
        problem = self._checkpointer.last_error()
        if problem is not None:
            self._report(f"{problem}; training goes on")
