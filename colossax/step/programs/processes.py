"""Stages of several processes: each dispatches what its own devices have a part in.

Where a process has none of a stage's devices, shapes stand for that stage's arrays. Programs over
devices of several processes are dispatched by all of those, in one order: that of the table.
"""

import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.sharding.joint import sent_across, without_shards
from colossax.step.programs.ahead import Absent, jitted, rehearses


class Way(enum.Enum):
    """How arrays get from the devices of one stage to those of another."""

    COPY = "copied: all devices are of this process"
    BESIDE = "copied shard by shard: each device's partner is of its own process"
    ACROSS = "by a program over both sides, which all processes of both dispatch"


@functools.lru_cache(maxsize=4096)
def way(source: Mesh, there: Mesh) -> Way:
    """From the devices of one stage to those of another."""
    here = jax.process_index()
    pairs = [
        (x.process_index, y.process_index)
        for x, y in zip(source.devices.flat, there.devices.flat, strict=True)
    ]
    if all(pair == (here, here) for pair in pairs):
        return Way.COPY
    return Way.BESIDE if all(x == y for x, y in pairs) else Way.ACROSS


def in_several(bound: BoundPlan) -> bool:
    """Whether devices are of several processes, and there."""
    return len(_processes(bound.mesh)) > 1 and not rehearses()


@functools.lru_cache(maxsize=256)
def _processes(mesh: Mesh) -> frozenset[int]:
    return frozenset(device.process_index for device in mesh.devices.flat)


def program(here: BoundPlan, fn: Callable, **options: Any) -> Callable:
    """A stage's program; where this process has none of its devices, the shapes that it gives.

    Args:
        here: The plan on the stage's devices.
        fn: The program.
        **options: Of `jax.jit`.
    """
    has_part = rehearses() or here.mesh.local_devices
    return jitted(here, fn, **options) if has_part else _Shapes(fn)


class _Shapes:
    """What a program gives, by the form of its arguments; it is traced and not compiled."""

    def __init__(self, fn: Callable):
        self._fn = fn
        self._found: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        form = structure, tuple((x.shape, x.dtype) for x in leaves)
        if form not in self._found:
            self._found[form] = jax.eval_shape(self._fn, *_shapes(args))
        return self._found[form]


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def there(x: Any, sharding: NamedSharding) -> Any:
    """What a program gives, as an array also where this process has no part of it."""
    return x if isinstance(x, jax.Array | Absent) else without_shards(x, sharding)


def on_other_devices(x: Any, source: Mesh, there: Mesh) -> Any:
    """An array on the devices that stand where its own do, each of the same process."""
    if not there.local_devices:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    partner = dict(zip(source.devices.flat, there.devices.flat, strict=True))
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
    shards = [jax.device_put(s.data, partner[s.device]) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        x.shape, NamedSharding(there, spec), shards, dtype=x.dtype
    )


def sent_between(
    leaves: Sequence[Any], specs: Sequence[PartitionSpec], source: Mesh, there: Mesh
) -> list[Any]:
    """Arrays from the processes of one stage to those of another; see `sent`."""
    if not leaves or jax.process_index() not in _processes(source) | _processes(there):
        return _shapes(list(leaves))
    shardings = [NamedSharding(source, spec) for spec in specs]
    if source.local_devices:
        leaves = _laid(tuple(shardings))(list(leaves))
    moved = sent_across(leaves, shardings, there)
    return moved if there.local_devices else _shapes(moved)


@functools.lru_cache(maxsize=4096)
def _laid(shardings: tuple[NamedSharding, ...]) -> Callable[[list[Array]], list[Array]]:
    """Arrays split in this way, which the other side knows; those that are so stay as they are."""
    program = jax.jit(lambda leaves: leaves, out_shardings=list(shardings))

    def laid(leaves: list[Array]) -> list[Array]:
        pairs = zip(leaves, shardings, strict=True)
        as_is = all(x.sharding.is_equivalent_to(sharding, x.ndim) for x, sharding in pairs)
        return leaves if as_is else program(leaves)

    return laid


def connect(
    bound: BoundPlan, stages: Sequence[BoundPlan], pairs: Iterable[tuple[int, int]]
) -> None:
    """Send a number from stage to stage, so that processes know one another; this one waits.

    Later a process may be as late as its compiling takes; a first connection gives up in 30 seconds
    on CPUs.

    Args:
        bound: Plan and all devices.
        stages: The plan on the devices of each.
        pairs: Numbers of stages, from and to; alike in every process.
    """
    if rehearses():
        return
    nothing = jax.ShapeDtypeStruct((), jnp.int32)
    jax.block_until_ready(from_each(bound, stages, [nothing] * len(stages)))
    for source, to in sorted(set(pairs)):
        here, there = stages[source].mesh, stages[to].mesh
        if source != to and way(here, there) is Way.ACROSS:
            sharding = NamedSharding(here, PartitionSpec())
            number: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
            if here.local_devices:
                number = jnp.zeros((1,), jnp.int32, device=sharding)
            moved = sent_between([number], [PartitionSpec()], here, there)
            jax.block_until_ready([x for x in moved if isinstance(x, jax.Array)])


def from_each(bound: BoundPlan, stages: Sequence[BoundPlan], parts: Sequence[Any]) -> list[Any]:
    """What each stage has found, on the devices of all: one program that all processes dispatch.

    Args:
        bound: Plan and all devices.
        stages: The plan on the devices of each.
        parts: Of each stage, small arrays of the same form; shapes: zeros.

    Returns:
        The same of each stage, whole on all devices.
    """
    leaves = [jax.tree.leaves(part) for part in parts]
    rows = [_rows(bound, stages, list(each)) for each in zip(*leaves, strict=True)]
    structure = jax.tree.structure(parts[0])
    found = _spread(bound.mesh, len(parts))(rows)
    return [jax.tree.unflatten(structure, each) for each in found]


def _rows(bound: BoundPlan, stages: Sequence[BoundPlan], parts: list[Any]) -> Array:
    """`[stages, ...]`, the part of each stage on its own devices."""
    shards = []
    for stage, part in zip(stages, parts, strict=True):
        if isinstance(part, jax.Array):
            (whole,) = _laid((NamedSharding(stage.mesh, PartitionSpec()),))([part])
            shards += [shard.data[None] for shard in whole.addressable_shards]
        else:
            nothing = (1, *part.shape), part.dtype
            shards += [jnp.zeros(*nothing, device=d) for d in stage.mesh.local_devices]
    shape = (len(parts), *parts[0].shape)
    sharding = NamedSharding(bound.mesh, PartitionSpec(MeshAxis.STAGE.value))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=parts[0].dtype)


@functools.lru_cache(maxsize=64)
def _spread(mesh: Mesh, count: int) -> Callable[[list[Array]], list[list[Array]]]:
    def spread(rows: list[Array]) -> list[list[Array]]:
        whole = jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec()))
        return [[x[at] for x in whole] for at in range(count)]

    return jax.jit(spread, out_shardings=NamedSharding(mesh, PartitionSpec()))
