"""Layers that the CPU updates in their memory while the devices update the others.

It cannot be part of a program: inside a loop that carries host memory, XLA refuses computations on
the host. So a step's program ends with the gradients of all layers whose optimizer state is in host
memory. A second program, of the devices, is started on the layers that are theirs; until it ends,
the CPU goes through its own.
"""

import contextlib
import ctypes
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from colossax.config import BoundPlan
from colossax.errors import OffloadError, PlanError
from colossax.layerwise import Key, Stacks
from colossax.offload import cpu_device
from colossax.step.offloaded.parameter_groups import Part, Update
from colossax.step.offloaded.streaming import Pending, Streaming
from colossax.typing import Metrics, TrainState

Row = tuple[list[Any], list[Any]]
"""Parameters and optimizer state of a layer."""


class CpuUpdate:
    """The second half of a step: layers in host memory, updated by CPU and devices at once.

    The state is where it is without a CPU's share, pinned for the devices. The CPU reads a layer
    there without a copy where one device holds it whole, and overwrites it there: what a step's
    program put out, which nobody else has seen yet.

    Cost: of what the CPU updates, nothing crosses the bus but gradients, down, and parameters, up,
    as forward and backward want them. In host memory each layer is written twice, one copy from RAM
    to RAM beside the update itself; two layers are kept for it, and several where devices hold
    parts of a layer. Gradients are kept as with clipping `stack`. A call returns when the CPU is
    done, so that the next step cannot be prepared meanwhile.
    """

    def __init__(self, streaming: Streaming, shardings: TrainState, options: Any = None):
        """Nothing is compiled yet.

        Args:
            streaming: The parts.
            shardings: Of the state.
            options: For the devices' compiler.

        Raises:
            PlanError: Several processes hold parts of a layer, or layers are to be clipped by
                norms of their own.
            InputError: JAX was told to leave the CPU alone.
        """
        if jax.process_count() > 1:
            raise PlanError(
                "plan.offload.cpu_update: several processes hold parts of each layer, and their"
                " CPUs cannot share it; give off"
            )
        self._cpu = cpu_device()
        self._streaming = streaming
        self._parts = streaming.parts_for(streaming.on_cpu, _on_one(streaming.bound, self._cpu))
        self._updates = {
            key: jax.jit(functools.partial(_update_row, part), donate_argnums=0, keep_unused=True)
            for key, part in self._parts.items()
        }
        self._room: dict[Key, list[Row]] = {key: [] for key in self._parts}
        where = self._stacks_of(shardings)
        self._on_devices = jax.jit(
            self._visit, donate_argnums=0, out_shardings=where, compiler_options=options
        )

    def _stacks_of(self, state: TrainState) -> dict[Key, Stacks]:
        """Parameters and optimizer state of what the devices update meanwhile."""
        stacks = self._streaming.stacks(state["params"], state["opt_state"])
        return {key: stacks[key] for key in self._streaming.beside_cpu}

    def _visit(
        self, stacks: dict[Key, Stacks], grads: dict[Key, list[Any]], update: Update
    ) -> dict[Key, Stacks]:
        def one(key: Key, part: Part) -> Stacks:
            updated = part.visit_all(dataclasses.replace(stacks[key], grads=grads[key]), update)
            return dataclasses.replace(updated, grads=None)

        return {key: one(key, part) for key, part in self._streaming.beside_cpu.items()}

    def update(self, state: TrainState, pending: Pending, metrics: Metrics) -> TrainState:
        """The state with all of these layers updated.

        Raises:
            OffloadError: The CPU's side failed; the state is of no use then.
        """
        stacks = self._streaming.stacks(state["params"], state["opt_state"])
        beside = self._stacks_of(state)
        grads = {key: pending.grads[key] for key in beside}
        # Started first, and not waited for: it runs while the CPU works.
        changed = dict(self._on_devices(beside, grads, pending.update)) if beside else {}
        with _explained():
            for key in self._parts:
                with_grads = dataclasses.replace(stacks[key], grads=pending.grads[key])
                changed[key] = self._on_cpu(key, with_grads, pending.update)
        return self._streaming.with_stacks(state, changed)

    def _on_cpu(self, key: Key, stacks: Stacks, update: Update) -> Stacks:
        """One run's layers, each written while the next is computed."""
        part = self._parts[key]
        # What lies there is only right, and only ours, once the program that makes it has ended.
        stacks, update = jax.block_until_ready((stacks, update))
        cpu_update = jax.device_put(jax.tree.map(np.asarray, update), self._cpu)
        params, state, grads = (
            [HostRows(x, stacked=part.stacked) for x in leaves]
            for leaves in (stacks.params, stacks.state, stacks.grads)
        )
        written = [*params, *state]
        last: tuple[int, Row] | None = None
        for i in range(part.count):
            row = self._update_layer(key, i, (params, state, grads), cpu_update)
            if last is not None:
                self._write(key, written, *last)
            last = i, row
        if last is not None:
            self._write(key, written, *last)
        return Stacks(params=[x.array() for x in params], state=[x.array() for x in state])

    def _update_layer(self, key: Key, i: int, rows: Any, update: Update) -> Row:
        params, state, grads = jax.device_put(
            [[leaf.read(i) for leaf in leaves] for leaves in rows], self._cpu
        )
        free = self._room[key]
        room = free.pop() if free else self._like((params, state))
        return self._updates[key](room, params, state, grads, update, np.int32(i))

    def _like(self, row: Row) -> Row:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=self._cpu), row)

    def _write(self, key: Key, into: Sequence["HostRows"], i: int, row: Row) -> None:
        row = jax.block_until_ready(row)
        for rows, leaf in zip(into, jax.tree.leaves(row), strict=True):
            rows.write(i, _memory(leaf))
        self._room[key].append(row)


def _on_one(bound: BoundPlan, device: jax.Device) -> BoundPlan:
    """The plan on a mesh of this device alone."""
    axes = bound.mesh.axis_names
    grid = np.asarray(device, dtype=object).reshape([1] * len(axes))
    mesh = Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))
    return dataclasses.replace(bound, mesh=mesh)


def _update_row(
    part: Part,
    room: Row,
    params: list[Any],
    state: list[Any],
    grads: list[Any],
    update: Update,
    row: Any,
) -> Row:
    """A layer's new parameters and state, written into `room`, which is donated for it."""
    moved, new_state, _ = part.update(params, state, part.gradients(grads), update, row)
    return moved, new_state


class HostRows:
    """A stack's rows, to read and to overwrite from outside of JAX.

    Of an array in host memory they are its own memory; of one on a device, where vectors are, a
    copy of all that is put back at the end.
    """

    def __init__(self, stack: jax.Array, *, stacked: bool):
        """Wait for the stack first; keep it as long as this.

        Args:
            stack: `[rows, ...]`, or one row.
            stacked: Which of both.
        """
        self._stack = stack
        self._in_place = stack.sharding.memory_kind == "pinned_host"
        self._copy = None if self._in_place else np.array(stack)
        self._shape = stack.shape[stacked:]
        if self._copy is not None:
            shards = [((slice(None),) * stack.ndim, self._copy)]
        else:
            shards = [(shard.index, _memory(shard.data)) for shard in stack.addressable_shards]
        self._shards = [(index[1:], x) if stacked else (index, x[None]) for index, x in shards]

    def read(self, row: int) -> np.ndarray:
        """Row `row`; the memory itself where one device holds all of it."""
        shards = self._shards
        if shards[0][1].shape[1:] == self._shape:
            return shards[0][1][row]
        full = np.empty(self._shape, self._stack.dtype)
        for index, shard in shards:
            full[index] = shard[row]
        return full

    def write(self, row: int, values: np.ndarray) -> None:
        """Overwrite a row, wherever any of it is held."""
        for index, shard in self._shards:
            shard[row] = values[index]

    def array(self) -> jax.Array:
        """The stack as it is now."""
        if self._in_place:
            return self._stack
        return jax.device_put(self._copy, self._stack.sharding)


def _memory(x: jax.Array) -> np.ndarray:
    """The memory of an array of one device's, in host memory, row by row; it must be kept alive."""
    if not x.size:
        return np.empty(x.shape, x.dtype)
    size = math.prod(x.shape) * x.dtype.itemsize
    held = (ctypes.c_uint8 * size).from_address(x.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(held).view(x.dtype).reshape(x.shape)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say of what goes wrong where it did, and what is left."""
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        raise OffloadError(
            f"plan.offload.cpu_update: the CPU's update failed ({problem}), and the state is half"
            " updated; resume from the last checkpoint, or give off"
        ) from problem
