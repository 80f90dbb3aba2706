"""A training state as records of a checkpoint, and back onto any mesh."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.checkpoint import ArraySlot, Checkpointer, slot_of
from colossax.errors import InputError
from colossax.optim import ByModel
from colossax.sharding import replicated
from colossax.step.gradients.loss_scale import LOSS_SCALE
from colossax.typing import ParamInfo, Params, TrainState

if TYPE_CHECKING:
    from colossax.step.step import Step

MODEL = "model"
"""Name of a model that is alone, and of what belongs to no one model."""

NOTED = "noted"
"""Kind of records of what is noted of steps beside parameters."""


class StateRecords:
    """What of a checkpoint each array of a step's state is."""

    def __init__(self, step: "Step"):
        """Name the records; nothing is read or written."""
        self._step = step
        self._slots = state_slots(step)
        self._held: dict[str, Any] = jax.tree.map(lambda _: True, self._slots)
        self._held["params"] = jax.tree.map(lambda info: not info.of_base, step.spec.infos)
        self._on_disk = _disk_slots(step)

    @property
    def on_host(self) -> bool:
        """Whether any of the state lives in host memory or on disk."""
        kinds = {sharding.memory_kind for sharding in jax.tree.leaves(self._step.shardings)}
        return "pinned_host" in kinds or self._step.disk is not None

    def pairs(self, state: TrainState) -> list[Any]:
        """What `Checkpointer.save` takes: slots with their arrays, but those of a base.

        Raises:
            OffloadError: The optimizer's state cannot be read from disk.
        """
        every = zip(jax.tree.leaves(self._slots), jax.tree.leaves(state), strict=True)
        pairs: list[Any] = list(itertools.compress(every, jax.tree.leaves(self._held)))
        if self._step.disk is not None:
            pairs += zip(self._on_disk, self._step.disk.sources(), strict=True)
        return pairs

    def restored(
        self, checkpointer: Checkpointer, done: int | None, base: Params | None = None
    ) -> TrainState:
        """The state after `done` steps, laid out by the step's plan; None finds none.

        Args:
            checkpointer: Of the folder.
            done: Which.
            base: Parameters of the model that an adapter is of, laid out likewise; what else is
                among them is not looked at.

        Raises:
            CheckpointError: It is not there, damaged, or of another model or optimizer.
            InputError: There is an adapter, and no base.
        """
        fresh = self._fresh(checkpointer, done)
        named = {name: part for name, part in self._slots.items() if name not in fresh}
        slots, structure = jax.tree.flatten(named)
        where = jax.tree.leaves({name: self._step.shardings[name] for name in named})
        held = jax.tree.leaves({name: self._held[name] for name in named})
        beside = self._nothing_noted(checkpointer, done, slots, where) | self._of_base(held, base)
        wants = [each for at, each in enumerate(zip(slots, where, strict=True)) if at not in beside]
        disk = self._step.disk
        models = {MODEL, *self._step.spec.model_names}
        whole = [f"{model}/optimizer" for model in sorted(models)]
        found = iter(checkpointer.restore(done, wants, exact=disk is None, whole=whole))
        arrays = [beside[at] if at in beside else next(found) for at in range(len(slots))]
        state = {**jax.tree.unflatten(structure, arrays), **fresh}
        if disk is not None:
            disk.fill(state, lambda layer: self._restored_row(checkpointer, done, layer))
        return state

    def _fresh(self, checkpointer: Checkpointer, done: int | None) -> dict[str, Any]:
        """The first scale of the loss, where a step was saved without any: by one in bfloat16."""
        slots = jax.tree.leaves(self._slots.get(LOSS_SCALE, {}))
        if not slots or checkpointer.holds_record(done, slots[0].name):
            return {}
        return self._step.layout.first_scale(
            functools.partial(jax.device_put, device=replicated(self._step.bound))
        )

    def _nothing_noted(
        self, checkpointer: Checkpointer, done: int | None, slots: list[ArraySlot], where: list[Any]
    ) -> dict[int, jax.Array]:
        """By number of the slot, zeros for what was not saved: by a step that notes none."""
        return {
            at: jax.device_put(jnp.zeros(slot.shape, slot.dtype), sharding)
            for at, (slot, sharding) in enumerate(zip(slots, where, strict=True))
            if f"/{NOTED}/" in slot.name and not checkpointer.holds_record(done, slot.name)
        }

    def _of_base(self, held: Sequence[bool], base: Params | None) -> dict[int, jax.Array]:
        """By number of the slot, what checkpoints leave out."""
        left_out = [at for at, here in enumerate(held) if not here]
        if not left_out:
            return {}
        if base is None:
            raise InputError(
                "step.restore: the step has an adapter or a frozen model, whose parameters"
                " checkpoints leave out; give them as base=state['params']"
            )
        of_base = [info.of_base for info in jax.tree.leaves(self._step.spec.infos)]
        leaves = jax.tree.leaves(base, is_leaf=lambda x: x is None)
        return dict(zip(left_out, itertools.compress(leaves, of_base), strict=True))

    def _restored_row(self, checkpointer: Checkpointer, done: Any, layer: int) -> list[jax.Array]:
        """Optimizer state of one layer on disk."""
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        rows = [
            dataclasses.replace(slot, first=(slot.first or 0) + layer, layers=None)
            for slot in self._on_disk
        ]
        return checkpointer.restore(done, [(slot, where) for slot in rows], exact=False)


def state_slots(step: "Step") -> TrainState:
    """The state's structure with an `ArraySlot` for each array.

    Parameters are `<model>/params/<path>`, what mirrors them in the optimizer's state is
    `<model>/optimizer/<field>/<path>`, by layer of the whole stack: neither segments nor mesh show.
    A model that is alone is `model`; so a named one is stored as if it were alone.
    """
    abstract = step.abstract
    return {
        "params": jax.tree.map(
            lambda info, leaf: slot_of(
                info,
                f"{info.model or MODEL}/{NOTED if info.noted else 'params'}",
                dtype=np.dtype(leaf.dtype),
            ),
            step.spec.infos,
            abstract["params"],
        ),
        "opt_state": _optimizer_slots(step),
        "variables": plain_slots(abstract["variables"], f"{MODEL}/variables"),
        **{
            name: plain_slots(abstract[name], f"{MODEL}/state/{name}")
            for name in ("step", "rng", "skipped")
        },
        # A kind of its own: what has no scale goes on from what has one.
        **{
            name: plain_slots(abstract[name], f"{MODEL}/{name}")
            for name in (LOSS_SCALE,)
            if name in abstract
        },
    }


@dataclasses.dataclass(frozen=True)
class _Mark:
    """A leaf of the optimizer's state with the parameter it mirrors."""

    leaf: Any
    info: ParamInfo | None


def _disk_slots(step: "Step") -> list[ArraySlot]:
    """Of the optimizer state on disk, in the order of its part."""
    if step.disk is None:
        return []
    slots = jax.tree.leaves(_optimizer_slots(step, on_disk=True))
    return [slots[j] for j in step.disk.part.slots]


def _optimizer_slots(step: "Step", *, on_disk: bool = False) -> Any:
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


def plain_slots(tree: Any, prefix: str) -> Any:
    """Slots of arrays that are no parameters, each by its name in a tree: `<prefix>/<name>`."""
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
