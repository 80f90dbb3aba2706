"""Optimizer state in a file: layers are updated after a step's program, one record each.

A record holds a layer's parameters and optimizer state, so that what the last committed epoch
holds is the whole training state where every layer is on disk: an epoch is a step. Its metrics are
committed with it, as a process may be killed before they are recorded anywhere else.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from colossax.checkpoint import LayerSource
from colossax.errors import DamagedStoreError, OffloadError, PlanError
from colossax.offload import fetch, new_stack, store
from colossax.offload.disk import RING, RecordLayout, RecordStore, disk_bytes
from colossax.step.offloaded.parameter_groups import Update
from colossax.step.offloaded.streaming import Pending, Streaming
from colossax.step.updaters import RECORDED
from colossax.typing import Metrics, TrainState

FILE = "layers.state"
"""Name of the file in its folder."""

Rows = Mapping[str, Any]

_METRICS_BYTES = 8 * len(RECORDED)
"""Of a step's metrics at the end of a commit's tail: `<f8[len(RECORDED)]`."""

_TAIL_COPIES = 2
"""Of what is in no record, while it is committed: as arrays, which JAX keeps, and as a block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskCost:
    """What layers on disk take; nothing of it is hidden, as it comes after a step's program.

    Attributes:
        layers: How many of them.
        file_bytes: Of two epochs.
        read_bytes: Per step.
        written_bytes: Per step: as many, and what else the state has, where the file holds it all.
        memory_bytes: Of the host, for the records on their way and the rest while it is written.
    """

    layers: int
    file_bytes: int
    read_bytes: int
    written_bytes: int
    memory_bytes: int


class DiskTier:
    """The file that holds the optimizer state of a step's layers.

    Cost: disk bytes of two epochs, each parameters and optimizer state of the layers; per step it
    reads one and writes the other. Host memory for four records, and twice what is in no
    record where every layer is on disk (embedding and head with their moments).
    """

    def __init__(self, streaming: Streaming, abstract: TrainState, folder: Path):
        """Name the folder; nothing is written yet.

        Args:
            streaming: The parts.
            abstract: Shapes, dtypes and shardings of the state.
            folder: Where the file is, or will be.

        Raises:
            PlanError: Several layer stacks would need a file each, or several processes hold parts
                of a layer.
        """
        if len(streaming.on_disk) > 1:
            names = sorted({key[0] for key in streaming.on_disk})
            raise PlanError(
                f"plan.offload.disk: the layers of {names} that would lie on disk are"
                f" {len(streaming.on_disk)} runs that differ, and a file holds one; give"
                " parameters and activations 0 or at least the share of disk, equal segments, and"
                " one layer stack"
            )
        if jax.process_count() > 1:
            raise PlanError(
                "plan.offload.disk: several processes hold parts of each layer, and a file belongs"
                " to one; keep the optimizer's state in host memory"
            )
        ((self._key, self.part),) = streaming.on_disk.items()
        self.has_full_state = all(part.on_disk for part in streaming.parts.values())
        self.path = folder / FILE
        self.owner = ""
        """Whose the file is that `fill` makes; a run says it before there is one."""
        self._abstract = abstract
        self._opened: RecordStore | None = None
        leaves = jax.tree.leaves(abstract["params"])
        row_of = jax.eval_shape(
            lambda stacks: fetch(stacks, 0, stacked=self.part.stacked),
            [leaves[i] for i in self.part.trained],
        )
        self._names = [f"params.{i}" for i in range(len(row_of))]
        self._state_rows = jax.eval_shape(self.part.init)
        self._state_names = [f"state.{j}" for j in self.part.slots]
        rows = [*row_of, *self._state_rows]
        self.layout = RecordLayout.of(
            dict(zip((*self._names, *self._state_names), rows, strict=True))
        )
        self._init_row = jax.jit(self.part.init)
        self._fetch = jax.jit(functools.partial(fetch, stacked=self.part.stacked))
        self._store = jax.jit(functools.partial(store, stacked=self.part.stacked), donate_argnums=0)
        self._update = jax.jit(self._update_row, donate_argnums=0)

    def cost(self) -> DiskCost:
        """Bytes of the file and of a step, before there is any."""
        layers, slot_bytes = self.part.count, self.layout.slot_bytes
        return DiskCost(
            layers=layers,
            file_bytes=disk_bytes(
                self.layout, layers, tail_bytes=max(self._tail_bytes(), 1), owner=self.owner
            ),
            read_bytes=layers * slot_bytes,
            written_bytes=layers * slot_bytes + self._tail_bytes(),
            memory_bytes=RING * slot_bytes + _TAIL_COPIES * self._tail_bytes(),
        )

    # Between states and records

    def _numbers(self) -> tuple[list[int], list[int]]:
        """Places, among the state's leaves, of parameters in records, and of all others."""
        marks = {**self._abstract, "params": list(range(self._structure().num_leaves))}
        trained = set(self.part.trained)
        flat = jax.tree_util.tree_flatten_with_path(marks)[0]
        inside = [
            at
            for at, (path, leaf) in enumerate(flat)
            if path[0].key == "params" and leaf in trained
        ]
        return inside, [at for at in range(len(flat)) if at not in set(inside)]

    def _structure(self) -> Any:
        return jax.tree.structure(self._abstract["params"])

    def _stacks(self, state: TrainState) -> list[jax.Array]:
        leaves = jax.tree.leaves(state["params"])
        return [leaves[i] for i in self.part.trained]

    def _with_stacks(self, state: TrainState, stacks: list[jax.Array]) -> TrainState:
        leaves = jax.tree.leaves(state["params"])
        for i, stack in zip(self.part.trained, stacks, strict=True):
            leaves[i] = stack
        return {**state, "params": jax.tree.unflatten(self._structure(), leaves)}

    def _tail(self, state: TrainState, metrics: Metrics | None = None) -> Iterator[np.ndarray]:
        """All of the state that is in no record, then the metrics of the step that led to it.

        Nothing where other layers are not on disk. Files from before metrics have no room for them.
        """
        if not self.has_full_state:
            return
        leaves = jax.tree.leaves(state)
        yield from (np.ascontiguousarray(leaves[at]) for at in self._numbers()[1])
        opened = self._opened
        if metrics is not None and opened is not None and opened.tail_bytes >= self._tail_bytes():
            yield np.array([float(metrics[name]) for name in RECORDED], "<f8")

    def _tail_bytes(self) -> int:
        if not self.has_full_state:
            return 0
        leaves = jax.tree.leaves(self._abstract)
        sizes = [leaves[at].size * leaves[at].dtype.itemsize for at in self._numbers()[1]]
        return sum(sizes) + _METRICS_BYTES

    # A run's life

    def fill(self, state: TrainState, rows: Callable[[int], list[Any]] | None = None) -> None:
        """Make the file, or take it over, with this state as its only epoch.

        Args:
            state: Fresh, or restored.
            rows: Optimizer state of a layer; None: that of a fresh one.

        Raises:
            OffloadError: The disk has no room, or the file is another run's.
        """
        opened = self._open()
        if opened is not None and not self._fits(opened):
            self.close()
            self.path.unlink()
            opened = None
        opened = opened or self._create()
        opened.reset()
        epoch, stacks = int(state["step"]), self._stacks(state)
        for i in range(self.part.count):
            state_rows = self._init_row() if rows is None else rows(i)
            params = self._fetch(stacks, i)
            values = (*params, *state_rows)
            named = zip((*self._names, *self._state_names), values, strict=True)
            opened.fill(i, {name: np.asarray(x) for name, x in named}, epoch)
        opened.commit(epoch, self._tail(state))

    def _fits(self, opened: RecordStore) -> bool:
        """Whether a file is this run's, and has room for all that is committed now."""
        return opened.owner == self.owner and opened.tail_bytes >= self._tail_bytes()

    def _create(self) -> RecordStore:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise OffloadError(
                f"disk store '{self.path}' cannot be made ({problem.strerror}); choose another"
                " folder"
            ) from problem
        self._opened = RecordStore.create(
            self.path,
            self.layout,
            self.part.count,
            tail_bytes=max(self._tail_bytes(), 1),
            owner=self.owner,
        )
        return self._opened

    def _open(self) -> RecordStore | None:
        if self._opened is None and self.path.exists():
            self._opened = RecordStore.open(self.path, self.layout, self.part.count)
        return self._opened

    def close(self) -> None:
        """Let go of the file."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def update(self, state: TrainState, pending: Pending, metrics: Metrics) -> TrainState:
        """The state with the layers on disk updated as well; the file holds it, too, then.

        Raises:
            DamagedStoreError: A record is not what was written.
            OffloadError: The disk refuses. The file holds the state before the step.
        """
        opened = self._open()
        if opened is None:
            raise OffloadError(
                f"disk store '{self.path}' is not there; make the state with step.init or restore"
                " it, which fills the file"
            )
        grads = pending.grads[self._key]
        stacks = self._stacks(state)
        epoch = int(state["step"]) - 1

        def change(i: int, arrays: Rows) -> Rows:
            nonlocal stacks
            rows = [
                self._put(arrays[name], where)
                for name, where in zip(self._state_names, self.part.state_shardings(), strict=True)
            ]
            stacks, params, rows = self._update(stacks, grads, jnp.int32(i), rows, pending.update)
            names = (*self._names, *self._state_names)
            return dict(zip(names, (*params, *rows), strict=True))

        opened.update(epoch, change)
        state = self._with_stacks(state, stacks)
        opened.commit(epoch + 1, self._tail(state, metrics))
        return state

    def _put(self, array: np.ndarray, sharding: NamedSharding | None) -> jax.Array:
        return jax.device_put(array) if sharding is None else jax.device_put(array, sharding)

    def _update_row(
        self,
        stacks: list[jax.Array],
        grads: list[jax.Array],
        i: jax.Array,
        state: list[jax.Array],
        update: Update,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        stacked = self.part.stacked
        params = fetch(stacks, i, stacked=stacked)
        layer_grads = self.part.gradients(fetch(grads, i, stacked=stacked))
        moved, state, _ = self.part.update(params, state, layer_grads, update, i)
        return store(stacks, moved, i, stacked=stacked), moved, state

    def latest(self) -> int | None:
        """The step whose whole state the file holds; None where it holds none.

        Raises:
            OffloadError: The file is another run's.
        """
        if not self.has_full_state:
            return None
        try:
            opened = self._open()
        except DamagedStoreError:
            return None
        return None if opened is None else opened.consistent_epoch()

    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics (`RECORDED`) of the step whose state the file holds and of the one before.

        By step; one is left out that was not committed with them, or whose commit is gone.
        """
        opened = self._open()
        assert opened is not None and self.has_full_state
        found = {}
        for epoch, tail in sorted(opened.tails().items()):
            if len(tail) == self._tail_bytes():
                numbers = np.frombuffer(tail[-_METRICS_BYTES:], "<f8").tolist()
                found[epoch] = dict(zip(RECORDED, numbers, strict=True))
        return found

    @property
    def found_owner(self) -> str:
        """Whose the file is that is there; empty where it does not say."""
        opened = self._open()
        return "" if opened is None else opened.owner

    def restore(self) -> TrainState:
        """The state that the file holds.

        Raises:
            DamagedStoreError: Something in it is not what was written.
        """
        opened = self._open()
        assert opened is not None and self.has_full_state
        leaves: list[Any] = list(jax.tree.leaves(self._abstract))
        inside, others = self._numbers()
        tails = opened.tails()
        tail, at = tails[max(tails)], 0
        for i in others:
            size = leaves[i].size * leaves[i].dtype.itemsize
            values = np.frombuffer(tail[at : at + size], leaves[i].dtype).reshape(leaves[i].shape)
            leaves[i] = _placed(values, leaves[i].sharding)
            at += size
        stacks = self._empty([leaves[i] for i in inside])
        for i in range(self.part.count):
            arrays = opened.read(i)
            stacks = self._store(stacks, [arrays[name] for name in self._names], jnp.int32(i))
        for i, stack in zip(inside, stacks, strict=True):
            leaves[i] = stack
        return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves)

    def _empty(self, like: list[Any]) -> list[jax.Array]:
        part = self.part

        def make() -> list[jax.Array]:
            return [
                new_stack(
                    part.count,
                    jax.ShapeDtypeStruct(x.shape[part.stacked :], x.dtype),
                    host=x.sharding.memory_kind == "pinned_host",
                    stacked=part.stacked,
                    sharding=part.row_sharding(x.sharding),
                )
                for x in like
            ]

        return jax.jit(make, out_shardings=[x.sharding for x in like])()

    def sources(self) -> list[LayerSource]:
        """Optimizer state of all layers, each leaf read from the file layer by layer.

        Raises:
            DamagedStoreError: Something in it is not what was written.
        """
        opened = self._open()
        assert opened is not None
        opened.verify()
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def source(name: str, row: Any) -> LayerSource:
            shape = (self.part.count, *row.shape) if self.part.stacked else tuple(row.shape)
            read = functools.partial(opened.read_array, name=name)
            return LayerSource(shape=shape, dtype=np.dtype(row.dtype), sharding=where, read=read)

        pairs = zip(self._state_names, self._state_rows, strict=True)
        return [source(name, row) for name, row in pairs]


def _placed(values: np.ndarray, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
