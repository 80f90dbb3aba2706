"""What a device sends in a step by formula: weights, gradients, activations, keys and values.

Of a collective over `n` devices whose whole is `V` bytes (what is gathered, or what is scattered),
each sends `(n - 1) / n V` in a ring, and twice that where all get the sum. tests/planner and
bench/planner.py count the same in compiled programs.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from colossax.config import RING_AXES, SEQUENCE_AXES, MeshAxis
from colossax.planner.profiling import LayerKind, Map, ModelProfile
from colossax.planner.searching.experts import experts_sent
from colossax.planner.searching.parts import Parts
from colossax.planner.searching.sent import Sent, joined, sent_along, times
from colossax.sharding import activation_axes
from colossax.sharding.rules import TABLE_WIDTH
from colossax.typing import ParamInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Of a microbatch.

    Attributes:
        inside: On a device inside of a layer.
        held: On a device between the layers, where `tensor` may split them too.
    """

    inside: float
    held: float


Widths = tuple[float, list[tuple[int, float]]]
"""See `widths`."""


class WeightsSent(NamedTuple):
    """Collectives of weights, and of their gradients.

    Attributes:
        gathered: Of all layers, forward and backward.
        summed: Gradients of those.
        outside: Weights of what is no layer.
        outside_summed: Gradients of those.
    """

    gathered: tuple[Sent, ...]
    summed: tuple[Sent, ...]
    outside: tuple[Sent, ...]
    outside_summed: tuple[Sent, ...]


def weights_sent(profile: ModelProfile, parts: Parts) -> WeightsSent:
    """Gathers of weights and sums of their gradients, of a microbatch that all layers see."""
    gathered: list[Sent] = []
    summed: list[Sent] = []
    for kind in profile.kinds:
        weights, gradients = _weights(profile, parts, kind.leaves, passes=2)
        gathered += times(weights, kind.calls)
        summed += times(gradients, kind.calls)
    ends, their_gradients = _weights(profile, parts, profile.outside, passes=1)
    return WeightsSent(*map(joined, (gathered, summed, ends, their_gradients)))


def states_sent(profile: ModelProfile, parts: Parts) -> tuple[Sent, ...]:
    """New parameters, once a step, to devices that have parts of the optimizer's state alone."""
    found: list[Sent] = []
    for info in profile.infos:
        stored = parts.axes("params", info.dims, info.shape)
        state = parts.axes("optimizer", info.dims, info.shape)
        axes = tuple(axis for axis in state if axis not in stored)
        if (n := parts.size(axes)) > 1:
            at_rest = info.at_rest(parts.bound.plan.precision.params).itemsize
            size = math.prod(info.shape) / parts.size(stored) * at_rest
            found.append(sent_along("all-gather", axes, (n - 1) / n * size, 1, False))
    return joined(found)


def tokens_sent(
    profile: ModelProfile,
    parts: Parts,
    split: Sequence[Widths],
    tokens: Tokens,
    kept: Sequence[Sequence[tuple[int, frozenset[str]]]],
    lookups: float = 1.0,
) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    """What a device sends for its tokens in a microbatch: in layers, and beside them.

    Args:
        profile: The model.
        parts: Plan and mesh.
        split: Of each kind of layer, see `widths`.
        tokens: Of the microbatch.
        kept: Of each kind of layer, how many keep which names.
        lookups: How often its tokens are looked up; see `Stages.lookups`.
    """
    found: list[Sent] = []
    for kind, runs, wide in zip(profile.kinds, kept, split, strict=True):
        for count, names in runs:
            found += times(layer_sent(profile, parts, kind, wide, tokens, names), count)
    return joined(found), joined(_ends(profile, parts, tokens, lookups))


def layer_sent(
    profile: ModelProfile,
    parts: Parts,
    kind: LayerKind,
    split: Widths,
    tokens: Tokens,
    names: frozenset[str],
) -> list[Sent]:
    """What a device sends for its tokens in one call of a layer that keeps these names."""
    inside = tokens.inside * kind.tokens / profile.tokens
    held = inside * tokens.held / tokens.inside
    return [
        *_activations(parts, kind, split, inside, names),
        *_attention(parts, kind, inside, names),
        *experts_sent(profile, parts, kind, held),
    ]


def _weights(
    profile: ModelProfile, parts: Parts, leaves: Iterable[int], passes: int
) -> tuple[list[Sent], list[Sent]]:
    """Gathers of weights for each pass, and sums of the gradients of those that learn."""
    plan = parts.bound.plan
    found: list[Sent] = []
    sums: list[Sent] = []
    compute = np.dtype(plan.precision.compute).itemsize
    reduction = np.dtype(plan.precision.reduction or plan.precision.compute).itemsize
    once = plan.batch.reduce_once
    if once:
        reduction = np.dtype(plan.precision.accumulation).itemsize
    for leaf in leaves:
        info, learns = profile.infos[leaf], profile.learns[leaf]
        shape, dims = info.shape, info.dims
        whole = parts.whole(dims, shape)
        stored = parts.own("params", dims, shape)
        summed = parts.own("gradients", dims, shape)
        numbers = math.prod(shape) / _layers(info) / parts.size(whole)
        gathered = tuple(axis for axis in stored if axis not in whole)
        scattered = tuple(axis for axis in summed if axis not in whole)
        others = tuple(axis for axis in parts.split if axis not in summed)
        matrix = len(shape) - (info.total_layers is not None) > 1
        wide = compute if matrix else 4
        looked_up = _table(info)
        if looked_up and info.dims[-1] == TABLE_WIDTH:
            gathered = ()  # its rows go to where they are wanted
            scattered = scattered if once else ()
        if n := parts.size(gathered) - 1:
            sent = n / (n + 1) * numbers
            found.append(sent_along("all-gather", gathered, passes * sent * wide, passes, True))
        if not learns:
            continue
        if n := parts.size(scattered) - 1:
            wide = reduction if matrix else 4
            sums.append(
                sent_along("reduce-scatter", scattered, n / (n + 1) * numbers * wide, 1, True)
            )
        if n := parts.size(others) - 1:
            # Of a table that is the head too there are two gradients.
            count = 2 if looked_up and info.dims[-1] != TABLE_WIDTH else 1
            held = count * numbers / parts.size([axis for axis in summed if axis not in whole])
            sent = 2 * n / (n + 1) * held * reduction
            sums.append(sent_along("all-reduce", others, sent, count, True))
    return found, sums


def _activations(
    parts: Parts, kind: LayerKind, split: Widths, inside: float, kept: frozenset[str]
) -> list[Sent]:
    """What split matmuls gather and sum; see `colossax.sharding.matmul.cost`."""
    axis = MeshAxis.TENSOR.value
    t = parts.size((axis,))
    if t == 1:
        return []
    wide = np.dtype(parts.bound.plan.precision.compute).itemsize
    into, out = split
    by_sequence = axis in activation_axes(parts.bound, "seq:residual")
    moved = inside * (t - 1) / t * wide
    again, _ = kind.traced.again[kept]
    repeated = sum(width for number, width in out if number in again)
    ends = sum(width for _, width in out)
    if by_sequence:
        return [
            sent_along("all-gather", (axis,), moved * (2 * into + ends), 2 * 2 + 2, False),
            sent_along("reduce-scatter", (axis,), moved * (ends + into + repeated), 5, False),
        ]
    return [sent_along("all-reduce", (axis,), 2 * moved * (into + ends + repeated), 5, False)]


def widths(profile: ModelProfile, parts: Parts, kind: LayerKind) -> Widths:
    """Widths of what is read by maps that `tensor` splits by output, each input once; and of each
    map that it splits by input its number and the width of its output."""
    into: dict[int, float] = {}
    out = []
    for number, one in enumerate(kind.traced.maps):
        info = profile.infos[kind.leaves[one.leaf]]
        if "experts" in info.dims:
            continue  # see `experts_sent`
        dims, shape = _row(info)
        read, made = _sides(one, dims, shape)
        if MeshAxis.TENSOR in _split_axes(parts, info, dims, made):
            into[one.reads] = 1.0 * math.prod(shape[at] for at in read)
        elif MeshAxis.TENSOR in _split_axes(parts, info, dims, read):
            out.append((number, float(math.prod(shape[at] for at in made))))
    return float(sum(into.values())), out


def _row(info: ParamInfo):
    stacked = info.total_layers is not None and info.dims[:1] == ("layers",)
    return info.dims[stacked:], info.shape[stacked:]


def _sides(one: Map, dims: Sequence[str | None], shape: Sequence[int]):
    """Numbers of the dims that a map contracts, and of those it makes."""
    count = len(shape)
    read = range(one.contracted) if one.first else range(count - one.contracted, count)
    return list(read), [at for at in range(count) if at not in read]


def _split_axes(parts: Parts, info: ParamInfo, dims, numbers) -> set[str]:
    return {
        axis
        for at in numbers
        if dims[at] is not None
        for axis in parts.axes("weights", (dims[at],), (_row(info)[1][at],))
    }


def _attention(parts: Parts, kind: LayerKind, inside: float, kept: frozenset[str]) -> list[Sent]:
    """Keys and values around a ring, sequence exchanged for heads."""
    ulysses = parts.size((MeshAxis.ULYSSES.value,))
    axes = tuple(axis for axis in RING_AXES if parts.size((axis,)) > 1)
    ring, found = parts.size(axes), []
    qkv = [array.shape for array in kind.traced.kept if array.name == "qkv"]
    if ring * ulysses == 1 or len(qkv) < 3:
        return found
    t = parts.size((MeshAxis.TENSOR.value,))
    wide = np.dtype(parts.bound.plan.precision.compute).itemsize
    heads, kv_heads, size = qkv[0][2] // t, max(1, qkv[1][2] // t), qkv[0][3]
    repeated = math.lcm(kv_heads, ulysses)
    again = 1 if "attention" not in kept else 0
    moving = 2 * inside * repeated * size
    if ring > 1:
        found.append(
            sent_along(
                "collective-permute",
                axes,
                moving * ((ring - 1) * ((2 + again) * wide + 4) - again * wide),
                (ring - 1) * (3 + again),
                True,
            )
        )
    if ulysses > 1:
        # What layers keep by name is not what was exchanged: it is exchanged again for backward.
        moved = (ulysses - 1) / ulysses * inside * size * 2 * (heads + repeated)
        axis = (MeshAxis.ULYSSES.value,)
        found.append(sent_along("all-to-all", axis, 3 * moved * wide, 3 * 4, False))
    return found


def _ends(profile: ModelProfile, parts: Parts, tokens: Tokens, lookups: float) -> list[Sent]:
    """Rows of tables, and what stands behind the layers."""
    found = []
    once, stages = parts.bound.plan.batch.reduce_once, parts.size((MeshAxis.STAGE.value,))
    wide = np.dtype(parts.bound.plan.precision.compute).itemsize
    for at in profile.outside:
        info = profile.infos[at]
        if not _table(info):
            continue
        for role in ("params",) if once else ("params", "gradients"):
            split = parts.axes(role, info.dims, info.shape)
            # Each stage has a part of the width.
            width = info.shape[-1] / (stages if MeshAxis.STAGE in split else 1)
            for in_sequence in (False, True):
                # Rows are exchanged along a batch's dims one after the other.
                axes = tuple(
                    axis
                    for axis in split
                    if axis in parts.split and (axis in SEQUENCE_AXES) == in_sequence
                )
                if (n := parts.size(axes)) > 1:
                    moved = lookups * (n - 1) / n * tokens.held * width * wide
                    found.append(sent_along("all-to-all", axes, moved, lookups, False))
    t = parts.size((MeshAxis.TENSOR.value,))
    if t > 1 and profile.kinds:
        width = profile.kinds[0].traced.kept[0].shape[-1]
        moved = (t - 1) / t * tokens.inside * width * wide
        axis = (MeshAxis.TENSOR.value,)
        found.append(sent_along("all-gather", axis, (1 + 1 / stages) * moved, 2, False))
        found.append(sent_along("reduce-scatter", axis, moved / stages, 1, False))
        found.append(sent_along("all-reduce", axis, 4 * moved, 2, False))
    return found


def _table(info: ParamInfo) -> bool:
    """Whether rows of it are looked up by token."""
    return len(info.shape) == 2 and info.dims[0] == "vocab"


def _layers(info: ParamInfo) -> int:
    return info.shape[0] if info.total_layers is not None and info.dims[0] == "layers" else 1
