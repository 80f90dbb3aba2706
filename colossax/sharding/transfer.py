"""Arrays from the layout of one binding to that of another: other meshes, devices, memories."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.sharding.joint import sent_across, without_shards
from colossax.sharding.rules import param_sharding
from colossax.typing import ParamInfo

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a binding lays out a tree of parameters, or of what mirrors them.

    Attributes:
        bound: Plan and devices.
        infos: Tree like the arrays, with `ParamInfo` leaves as the model has them under the plan.
        role: `params`, or another role of the plan's rules.
    """

    bound: BoundPlan
    infos: Any
    role: str = "params"

    @functools.cached_property
    def leaves(self) -> list[ParamInfo]:
        """The infos in the order of the arrays."""
        return jax.tree.leaves(self.infos)

    @functools.cached_property
    def shardings(self) -> list[NamedSharding]:
        """Where each array lives."""
        return [param_sharding(self.bound, self.role, info) for info in self.leaves]

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """In the order of the mesh."""
        return tuple(self.bound.mesh.devices.flat)


@dataclasses.dataclass(frozen=True)
class _Slice:
    """Layers of a source array that go into a target array.

    Attributes:
        number: Of the source array.
        rows: First and behind the last along its dim of layers; None: the array as it is, one
            layer or no part of a stack.
    """

    number: int
    rows: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How a target array is made up of source arrays.

    Attributes:
        slices: In the order of layers.
        unchanged: Whether it is the one source array, as it is.
        stacked: Whether it has a dim of layers.
    """

    slices: tuple[_Slice, ...]
    unchanged: bool
    stacked: bool


def transfer(tree: Any, source: Layout, target: Layout, *, donate: bool = False) -> Any:
    """The same values laid out by another binding: for another mesh, other devices or memory.

    Layer stacks may be cut into other segments there. On the same devices it is one jitted reshard;
    to other devices of one process a copy from device to device; across processes a program on a
    joint mesh sends each shard over, which is laid out anew there, and every process must call this
    alike. The result shares no memory with the source, so either may be given up to a step.

    Args:
        tree: Arrays as `source` lays them out. A process that has none of its devices may give
            their shapes.
        source: Where they are; of a model of several, as of one that is alone.
        target: Where they shall be.
        donate: Free the source's arrays once they have been moved.

    Raises:
        PlanError: The tree does not fit `source`, or `source` not `target`, by path; or the
            devices are spread over processes in a way that no joint mesh covers.

    Cost: compiled once for each pair of layouts. Each target device receives its shards, or those
    of the source's layout and then, from its neighbours, its own. Stacks in host memory that are
    cut anew, or sent to another process, pass through device memory whole.
    """
    leaves = _fitting(tree, source)
    cuts = _cuts(source, target)
    if source.devices == target.devices:
        moved = _program(cuts, tuple(target.shardings))(leaves)
    elif all(d.process_index == jax.process_index() for d in source.devices + target.devices):
        moved = _copied(leaves, cuts, source, target)
    else:
        moved = _sent(leaves, cuts, source, target)
    if donate:
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf.delete()
    return jax.tree.unflatten(jax.tree.structure(target.infos), moved)


def _copied(
    leaves: list[Any], cuts: tuple[_Cut, ...], source: Layout, target: Layout
) -> list[Array]:
    """To other devices of this process."""
    if not all(cut.unchanged for cut in cuts):
        there = Layout(bound=source.bound, infos=target.infos, role=source.role)
        leaves = _program(cuts, tuple(there.shardings))(leaves)
    else:
        leaves = [leaves[cut.slices[0].number] for cut in cuts]
    moved = jax.device_put(leaves, target.shardings)
    if not set(source.devices) & set(target.devices):
        return moved
    # What a device has already it keeps, as the same memory, whatever `may_alias` says.
    as_is = tuple(_Cut((_Slice(number, None),), True, False) for number in range(len(moved)))
    return _program(as_is, tuple(target.shardings))(moved)


def _sent(leaves: list[Any], cuts: tuple[_Cut, ...], source: Layout, target: Layout) -> list[Array]:
    """To as many devices of any process."""
    old, new = source.devices, target.devices
    if set(old) & set(new) or len(old) != len(new):
        raise PlanError(
            f"transfer: from {len(old)} to {len(new)} devices of several processes; they must be"
            " the same ones in the same order, or as many others"
        )
    there = sent_across(leaves, source.shardings, target.bound.mesh)
    program = _program(cuts, tuple(target.shardings))
    if target.bound.mesh.local_devices:
        return program(there)
    nothing = jax.eval_shape(program, there)
    return [
        without_shards(x, sharding) for x, sharding in zip(nothing, target.shardings, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _program(cuts: tuple[_Cut, ...], shardings: tuple[NamedSharding, ...]) -> Any:
    """`source arrays -> target arrays` on the devices that have both."""

    def moved(leaves: list[Array]) -> list[Array]:
        return [
            _in_memory(_assembled(leaves, cut), sharding.memory_kind == "pinned_host")
            for cut, sharding in zip(cuts, shardings, strict=True)
        ]

    return jax.jit(moved, out_shardings=list(shardings))


def _assembled(leaves: Sequence[Array], cut: _Cut) -> Array:
    if cut.unchanged:
        return leaves[cut.slices[0].number]
    parts = []
    for taken in cut.slices:
        x = _in_memory(leaves[taken.number], host=False)
        parts.append(x[None] if taken.rows is None else x[slice(*taken.rows)])
    x = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return x if cut.stacked else x[0]


def _in_memory(x: Array, host: bool) -> Array:
    wanted = HOST if host else DEVICE
    return x if jax.typeof(x).memory_space == wanted else jax.device_put(x, wanted)


def _fitting(tree: Any, source: Layout) -> list[Any]:
    """The arrays, once they are seen to be those of the layout.

    Raises:
        PlanError: Naming the first that is not.
    """
    arrays = dict(_by_key(tree))
    wanted = dict(_by_key(source.infos))
    odd = next((key for key in (*wanted, *arrays) if (key in arrays) != (key in wanted)), None)
    if odd is not None:
        where = "the source's layout" if odd in arrays else "the tree"
        raise PlanError(
            f"transfer: {where} has no '{odd}'; give the tree and the infos of one model under one"
            " plan"
        )
    for (key, info), sharding in zip(wanted.items(), source.shardings, strict=True):
        leaf = arrays[key]
        if tuple(leaf.shape) != info.shape:
            raise PlanError(
                f"transfer: {info.path} has shape {tuple(leaf.shape)}, and the source's layout says"
                f" {info.shape}; give the infos of the model that the arrays are of"
            )
        if isinstance(leaf, jax.Array) and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            raise PlanError(
                f"transfer: {info.path} does not lie as the source's layout says: found"
                f" {leaf.sharding}, not {sharding}; give the binding that laid it out"
            )
    return list(arrays.values())


def _by_key(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _cuts(source: Layout, target: Layout) -> tuple[_Cut, ...]:
    """How the target's arrays are made up of the source's.

    Raises:
        PlanError: They are of other models, by the path of the first that differs.
    """
    given: dict[str, list[tuple[int, ParamInfo]]] = {}
    for number, (name, info) in enumerate(_named(source)):
        given.setdefault(name, []).append((number, info))
    asked = _named(target)
    odd = sorted(set(given) ^ {name for name, _ in asked})
    if odd:
        side = "target" if odd[0] in given else "source"
        raise PlanError(
            f"transfer: the {side}'s model has no '{odd[0]}'; both must be of one model"
        )
    return tuple(_cut(given[name], info) for name, info in asked)


def _named(layout: Layout) -> list[tuple[str, ParamInfo]]:
    """Each parameter by its path within the one model, or by the whole path where several are."""
    alone = len({info.model for info in layout.leaves}) == 1
    return [(info.own_path if alone else info.path, info) for info in layout.leaves]


def _cut(given: list[tuple[int, ParamInfo]], info: ParamInfo) -> _Cut:
    first, end = info.first_layer or 0, (info.first_layer or 0) + info.layer_count
    layer = _layer_shape(info)
    slices = []
    for number, held in sorted(given, key=lambda pair: pair[1].first_layer or 0):
        if (_layer_shape(held), held.total_layers) != (layer, info.total_layers):
            raise PlanError(
                f"transfer: {info.path} is {_shown(held)} in the source and {_shown(info)} in the"
                " target; both must be of one model"
            )
        if (held.shape, held.first_layer) == (info.shape, info.first_layer):
            return _Cut((_Slice(number, None),), True, info.stacked)
        start = held.first_layer or 0
        low, high = max(first, start), min(end, start + held.layer_count)
        if low < high:
            rows = (low - start, high - start) if held.stacked else None
            slices.append(_Slice(number, rows))
    return _Cut(tuple(slices), False, info.stacked)


def _layer_shape(info: ParamInfo) -> tuple[int, ...]:
    return info.shape[1:] if info.stacked else info.shape


def _shown(info: ParamInfo) -> str:
    layers = "" if info.total_layers is None else f"{info.total_layers} layers of "
    return f"{layers}{list(_layer_shape(info))}"
