"""How fast collectives, matmuls and copies are on the devices that are here."""

import functools
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from colossax.aot import hops
from colossax.pallas.bench import Effort, time_calls
from colossax.pipeline.measured import CollectiveRate, DeviceRates

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
"""Of collectives that are measured."""

SIZES: Mapping[str, tuple[int, ...]] = {
    "gpu": tuple(4**n for n in range(7, 15)),
    "cpu": (2**14, 2**17, 2**20),
}
"""Bytes of what is gathered or scattered whole, by platform."""

COPIED: Mapping[str, int] = {"gpu": 2**29, "cpu": 2**22}
"""Bytes that are copied, by platform."""

_AXIS = "ring"


def measure_rates(
    sent: Any, dtype: str, devices: Sequence[jax.Device], effort: Effort
) -> dict[str, Any]:
    """Fields of `LinkTimes`: what devices of one kind do together, and one alone; of several kinds
    nothing.

    Args:
        sent: See `measure_device`.
        dtype: Likewise.
        devices: Of this process.
        effort: How long each is measured.
    """
    if len({device.device_kind for device in devices}) > 1:
        return {"collectives": (), "device": None}
    alone = measure_device(sent, dtype, devices[0], effort)
    return {"collectives": measure_collectives(devices, effort), "device": alone}


def measure_collectives(
    devices: Sequence[jax.Device], effort: Effort
) -> tuple[CollectiveRate, ...]:
    """Latency and rate of each kind of collective among all devices, by least squares.

    Args:
        devices: Two or more of this process, of one kind.
        effort: How long each size of each kind is measured; all of them by turns.

    Cost: a small program for each size of each kind.
    """
    count, sizes = len(devices), SIZES[devices[0].platform]
    calls = {f"{kind} {size}": _call(kind, devices, size) for kind in KINDS for size in sizes}
    took = {name: median(times) for name, times in time_calls(calls, [()], effort).items()}
    found = []
    for kind in KINDS:
        seconds = [took[f"{kind} {size}"] for size in sizes]
        sent = [_sent_bytes(kind, count, size) for size in sizes]
        latency, rate = fitted(hops(kind, count), sent, seconds)
        found.append(CollectiveRate(kind=kind, devices=count, latency_s=latency, bytes_per_s=rate))
    return tuple(found)


def fitted(number: int, sent: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency of a hop and bytes a second, of `seconds = number latency + sent / rate`.

    Relative errors count, so that small messages are as good as large ones. Where a latency would
    be below zero it is zero; so is it where the rate would have no bound.
    """
    times = np.array(seconds)
    rows = np.stack([number / times, np.array(sent) / times], axis=1)
    scale = rows.max(axis=0)
    (latency, each), *_ = np.linalg.lstsq(rows / scale, np.ones(len(times)), rcond=None)
    if latency < 0 or each <= 0:
        latency, each = 0.0, rows[:, 1].sum() * scale[1] / np.square(rows[:, 1]).sum()
    return float(latency / scale[0]), float(scale[1] / each)


def _sent_bytes(kind: str, count: int, size: int) -> float:
    return (2 if kind == "all-reduce" else 1) * (count - 1) / count * size


def _call(kind: str, devices: Sequence[jax.Device], size: int) -> Callable[[], Any]:
    """One collective of so many bytes; of `all-gather` the result has them, else what each device
    gives."""
    count = len(devices)
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    send: dict[str, Callable[[jax.Array], jax.Array]] = {
        "all-gather": lambda x: jax.lax.all_gather(x, _AXIS, tiled=True),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, _AXIS, tiled=True),
        "all-reduce": lambda x: jax.lax.psum(x, _AXIS),
        "all-to-all": lambda x: jax.lax.all_to_all(x, _AXIS, 0, 0, tiled=True),
    }
    numbers = max(1, size // 4 // count) * (1 if kind == "all-gather" else count)
    spec = PartitionSpec(_AXIS)
    run = jax.jit(
        jax.shard_map(send[kind], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    ones = np.ones(count * numbers, np.float32)
    return functools.partial(run, jax.device_put(ones, NamedSharding(mesh, spec)))


def measure_device(sent: Any, dtype: str, device: jax.Device, effort: Effort) -> DeviceRates:
    """A matmul of a microbatch's activations with weights four times as wide, and a copy.

    Args:
        sent: Shapes of what a layer hands to the next.
        dtype: Of both factors.
        device: Of this process.
        effort: How long each is measured.
    """
    largest = max(jax.tree.leaves(sent), key=lambda x: x.size)
    width = largest.shape[-1]
    rows = largest.size // width
    with jax.default_device(device):
        x, weights = jnp.ones((rows, width), dtype), jnp.ones((width, 4 * width), dtype)
        numbers = jnp.ones(COPIED[device.platform] // 8, jnp.float32)
    calls = {
        "matmul": functools.partial(jax.jit(jnp.dot), x, weights),
        # Negating keeps XLA from giving back the same buffer.
        "copy": functools.partial(jax.jit(jnp.negative), numbers),
    }
    took = {name: median(times) for name, times in time_calls(calls, [()], effort).items()}
    return DeviceRates(
        dtype=dtype,
        flops_per_s=2.0 * rows * width * 4 * width / took["matmul"],
        bytes_per_s=2.0 * numbers.nbytes / took["copy"],
    )
