"""Collectives run for their answers and their times, each within a time limit."""

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from colossax.config import MeshAxis

COLLECTIVES: dict[str, Callable[[jax.Array, str], jax.Array]] = {
    "all-reduce": lambda x, axis: jax.lax.psum(x, axis),
    "all-gather": lambda x, axis: jax.lax.all_gather(x, axis, tiled=True),
    "reduce-scatter": lambda x, axis: jax.lax.psum_scatter(x, axis, tiled=True),
}
"""By kind, what a device does with its own items."""

_REPEATS = 5  # the same on every process: a number chosen by a clock could differ between them
_PERIOD = 1021  # a prime: no two chunks of a power of two begin alike
_ITEM_BYTES = 4
_KIB, _MIB = 2**10, 2**20
_CPU_BYTES = (64 * _KIB, _MIB, 4 * _MIB)
_BYTES = (64 * _KIB, 4 * _MIB, 32 * _MIB)
_TWO_AXES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One collective along one mesh axis.

    Attributes:
        mesh: As `--plan.mesh` reads it.
        axis: Of this mesh.
        kind: Of `COLLECTIVES`.
        bytes: Of the larger side on each device: what is reduced or scattered, or comes together.
        seconds: Median of five calls, the time to start a program included; None after a fault.
        ring_bytes_per_s: Bytes each device sends in a ring, divided by `seconds`.
        fault: What went wrong.
        hung: Whether the limit passed, so that a thread and devices may still be busy.
    """

    mesh: str
    axis: str
    kind: str
    bytes: int
    seconds: float | None = None
    ring_bytes_per_s: float | None = None
    fault: str | None = None
    hung: bool = False

    @property
    def sentence(self) -> str:
        """The fault, with where it was."""
        return (
            f"{self.kind} along axis '{self.axis}' of mesh {self.mesh}, {self.bytes} bytes:"
            f" {self.fault}"
        )


def within(limit_s: float, work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)`, done in a thread that is left behind when it takes longer.

    Raises:
        TimeoutError: It has not ended in `limit_s` seconds.
    """
    future: Future = Future()

    def carry() -> None:
        try:
            future.set_result(work(*args))
        except Exception as problem:  # noqa: BLE001 (the caller's thread raises it)
            future.set_exception(problem)

    threading.Thread(target=carry, daemon=True).start()
    return future.result(limit_s)


def run_trials(devices: Sequence[jax.Device], *, limit_s: float) -> tuple[Trial, ...]:
    """All-reduce, all-gather and reduce-scatter of three sizes along each axis of `meshes`.

    None follows one that takes longer than `limit_s`, compilation included: its devices are busy.
    """
    done: list[Trial] = []
    for mesh, axis, kind, items in _cases(devices):
        done.append(_limited(mesh, axis, kind, items, limit_s))
        if done[-1].hung:
            break
    return tuple(done)


def meshes(devices: Sequence[jax.Device]) -> list[Mesh]:
    """All devices on one axis and, from eight on, on a mesh of 2 x n/2; none for one device."""
    count = len(devices)
    if count < 2:
        return []
    shapes: list[dict[str, int]] = [{MeshAxis.FSDP: count}]
    if count >= _TWO_AXES and count % 2 == 0:
        shapes.append({MeshAxis.DATA: 2, MeshAxis.FSDP: count // 2})
    return [_mesh(devices, shape) for shape in shapes]


def ring_bytes(kind: str, size: int, group: int) -> float:
    """Bytes each of `group` devices sends in a ring: size (g-1)/g, twice that to all-reduce."""
    once = size * (group - 1) / group
    return 2 * once if kind == "all-reduce" else once


def _mesh(devices: Sequence[jax.Device], shape: dict[str, int]) -> Mesh:
    grid = np.asarray(devices, dtype=object).reshape(tuple(shape.values()))
    return Mesh(grid, tuple(map(str, shape)), axis_types=(AxisType.Auto,) * len(shape))


def _cases(devices: Sequence[jax.Device]) -> list[tuple[Mesh, str, str, int]]:
    sizes = _CPU_BYTES if devices[0].platform == "cpu" else _BYTES
    return [
        (mesh, axis, kind, size // (_ITEM_BYTES * mesh.shape[axis]) * mesh.shape[axis])
        for mesh in meshes(devices)
        for axis in mesh.axis_names
        for kind in COLLECTIVES
        for size in sizes
    ]


def _limited(mesh: Mesh, axis: str, kind: str, items: int, limit_s: float) -> Trial:
    shape = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    trial = Trial(mesh=shape, axis=axis, kind=kind, bytes=items * _ITEM_BYTES)
    try:
        seconds, fault = within(limit_s, _attempt, mesh, axis, kind, items)
    except TimeoutError:
        fault = f"has not ended within {limit_s:g} s"
        return dataclasses.replace(trial, fault=fault, hung=True)
    except jax.errors.JaxRuntimeError as problem:
        return dataclasses.replace(trial, fault=f"failed: {str(problem).splitlines()[0]}")
    if fault is not None:
        return dataclasses.replace(trial, fault=fault)
    rate = ring_bytes(kind, trial.bytes, mesh.shape[axis]) / seconds
    return dataclasses.replace(trial, seconds=seconds, ring_bytes_per_s=rate)


def _attempt(mesh: Mesh, axis: str, kind: str, items: int) -> tuple[float, str | None]:
    """Median seconds and what is wrong with the last call's values."""
    spec = PartitionSpec(mesh.axis_names)
    local = COLLECTIVES[kind]
    program = jax.jit(
        jax.shard_map(lambda x: local(x, axis), mesh=mesh, in_specs=spec, out_specs=spec)
    )
    per_device = items // mesh.shape[axis] if kind == "all-gather" else items
    x = _input(NamedSharding(mesh, spec), per_device)
    out = jax.block_until_ready(program(x))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        out = jax.block_until_ready(program(x))
        times.append(time.perf_counter() - start)
    return statistics.median(times), _wrong(out, axis, kind, per_device)


def _input(sharding: NamedSharding, per_device: int) -> jax.Array:
    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return _items((index[0].start or 0) // per_device, per_device)

    return jax.make_array_from_callback((per_device * sharding.mesh.size,), sharding, shard)


def _items(rank: int, count: int) -> np.ndarray:
    """What the device at this place of the mesh gives: whole numbers, so that sums are exact."""
    one = (7 * np.arange(_PERIOD) + 131 * rank) % _PERIOD
    return np.resize(one.astype(np.float32), count)


def _wrong(out: jax.Array, axis: str, kind: str, per_device: int) -> str | None:
    """The first of this process's devices whose values are not the answer; None when all are."""
    mesh = out.sharding.mesh  # type: ignore[attr-defined]
    for shard in out.addressable_shards:
        values = np.asarray(shard.data)
        place = (shard.index[0].start or 0) // len(values)
        wanted = _answer(kind, *_group(mesh, axis, place), per_device)
        if values.shape != wanted.shape:
            return f"on device {shard.device.id} are {len(values)} values, not {len(wanted)}"
        count = int((values != wanted).sum())
        if count:
            return f"on device {shard.device.id}, {count} of {len(wanted)} values are wrong"
    return None


def _group(mesh: Mesh, axis: str, place: int) -> tuple[list[int], int]:
    """Places that communicate with this one, and which of them it is."""
    grid = np.arange(mesh.size).reshape(mesh.devices.shape)
    along = mesh.axis_names.index(axis)
    at: list[Any] = list(np.unravel_index(place, grid.shape))
    index = int(at[along])
    at[along] = slice(None)
    return grid[tuple(at)].tolist(), index


def _answer(kind: str, ranks: list[int], index: int, count: int) -> np.ndarray:
    """What device `index` of the group has to hold, computed without communicating."""
    if kind == "all-gather":
        return np.concatenate([_items(rank, count) for rank in ranks])
    period = np.sum([_items(rank, _PERIOD) for rank in ranks], axis=0)
    total = np.resize(period, count)
    return total if kind == "all-reduce" else np.split(total, len(ranks))[index]
