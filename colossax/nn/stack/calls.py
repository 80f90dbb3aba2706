"""How layers of several kinds are called, with their part of parameters and state."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from colossax.layerwise import Apply, Key, LayerRun, LayerState, checkpointed
from colossax.nn.stack.kinds import Stretch


class CallsByKind:
    """Of a stack with several kinds: all of a stretch's layers of one, or groups of them.

    Attributes:
        params: Stacked, of a group by kind, `[groups, layers of the kind in one, ...]`.
    """

    def __init__(self, segment: Any, stretch: Stretch):
        split = {kind: nnx.split(layers) for kind, layers in segment.items()}
        self._graphdefs = {kind: graphdef for kind, (graphdef, _) in split.items()}
        self._stretch = stretch
        params = {kind: nnx.to_pure_dict(params) for kind, (_, params) in split.items()}
        self.params = self._grouped(params) if self._alternates else params[self._only]

    @property
    def _alternates(self) -> bool:
        return len(self._stretch.group) > 1

    @property
    def _only(self) -> str:
        """The kind of a stretch that does not alternate."""
        return self._stretch.group[0][0]

    def left(self, side: Any) -> Any:
        """None: parameters in host memory are fetched for the layers."""
        return None

    def run(self, key: Key) -> LayerRun:
        """What a runner is told of them."""
        stretch = self._stretch
        if self._alternates:
            return LayerRun(
                key=key,
                apply=self._apply_group,
                first=stretch.first,
                count=stretch.repeats,
                group=stretch.group_size,
                stacked=True,
                policy=stretch.policy,
            )
        return LayerRun(
            key=key,
            apply=_of_kind(self._only, _apply(self._graphdefs[self._only])),
            first=stretch.first,
            first_row=stretch.first_row(self._only),
            count=stretch.count,
            stacked=stretch.count > 1,
            policy=stretch.policy,
        )

    def rows(self, scanned: Any) -> Any:
        """Their part of the stack's scanned state, by kind."""
        if scanned is None:
            return None
        rows = {}
        for kind in self._graphdefs:
            first, count = self._stretch.first_row(kind), len(self._stretch.numbers(kind))
            rows[kind] = jax.tree.map(lambda x, a=first, n=count: x[a : a + n], scanned.get(kind))
        return self._grouped(rows) if self._alternates else rows[self._only]

    def flat(self, rows: Any) -> Any:
        """Scanned state that came back, by kind `[layers of it, ...]`."""
        if rows is None:
            return None
        if not self._alternates:
            return {self._only: rows}
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

    def flat_sums(self, sums: dict[str, Array]) -> dict[str, Array]:
        """Sums, `[layers, ...]`."""
        if not self._alternates:
            return sums
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sums)

    def _grouped(self, by_kind: dict[str, Any]) -> dict[str, Any]:
        groups = self._stretch.repeats
        return jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), by_kind)

    def _apply_group(
        self, rows: Any, carry: Any, side: Any, state: LayerState
    ) -> tuple[Any, LayerState, dict[str, Array]]:
        """One group: its layers in order, each under the segment's policy."""
        scanned, sums, carried = [], [], state.carried
        for part in self._parts():
            row = jax.tree.map(part.cut, rows[part.kind])
            scanned_rows = None if state.scanned is None else state.scanned[part.kind]
            first = part.first(self._stretch, state)
            carry, given, carried, part_sums = self._in_a_row(
                part, row, carry, side, dataclasses.replace(first, carried=carried), scanned_rows
            )
            scanned.append(None if given is None else {part.kind: given})
            sums.append(part_sums)
        sizes = [size for _, size in self._stretch.group]
        done = dataclasses.replace(state, scanned=joined(scanned), carried=carried)
        return carry, done, joined_sums(sums, sizes)

    def _parts(self) -> Iterator["_Part"]:
        seen = dict.fromkeys(self._graphdefs, 0)
        offset = 0
        for kind, size in self._stretch.group:
            yield _Part(kind, offset, seen[kind], size)
            offset += size
            seen[kind] += size

    def _in_a_row(
        self, part: "_Part", rows: Any, carry: Any, side: Any, first: LayerState, scanned: Any
    ) -> Any:
        """Layers of one kind that stand in a row in a group."""
        apply = _of_kind(part.kind, _apply(self._graphdefs[part.kind]))

        def body(loop: Any, xs: Any) -> Any:
            carry, carried = loop
            i, row, scanned_row = xs
            state = LayerState(
                index=first.index + i, row=first.row + i, scanned=scanned_row, carried=carried
            )
            carry, state, sums = apply(row, carry, side, state)
            return (carry, state.carried), (state.scanned, sums)

        body = checkpointed(body, self._stretch.policy, in_loop=True)
        scanned_rows = jax.tree.map(part.cut, scanned)
        numbers = jnp.arange(part.size, dtype=jnp.int32)
        loop, (given, sums) = jax.lax.scan(
            body, (carry, first.carried), (numbers, rows, scanned_rows), unroll=part.size == 1
        )
        carry, carried = loop
        return carry, given, carried, sums


@dataclasses.dataclass(frozen=True)
class _Part:
    """Layers of one kind in a row: where they begin in a group, and among its others."""

    kind: str
    offset: int
    row: int
    size: int

    def cut(self, x: Array) -> Array:
        return x[self.row : self.row + self.size]

    def first(self, stretch: Stretch, state: LayerState) -> LayerState:
        """Of the first of them, in the group that `state` is of."""
        row = stretch.first_row(self.kind) + state.row * stretch.per_group(self.kind) + self.row
        return dataclasses.replace(state, index=state.index + self.offset, row=row)


def _apply(graphdef: Any) -> Apply:
    def apply(row: Any, carry: Any, side: Any, state: LayerState) -> Any:
        return nnx.merge(graphdef, row)(carry, side, state)

    return apply


def _of_kind(kind: str, apply: Callable) -> Apply:
    """With the kind's part of what travels whole."""

    def with_kind_state(row: Any, carry: Any, side: Any, state: LayerState) -> Any:
        if state.carried is None:
            return apply(row, carry, side, state)
        view = dataclasses.replace(state, carried=state.carried.get(kind))
        carry, view, sums = apply(row, carry, side, view)
        if kind not in state.carried:
            return carry, dataclasses.replace(view, carried=state.carried), sums
        return carry, dataclasses.replace(view, carried={**state.carried, kind: view.carried}), sums

    return with_kind_state


def joined(parts: Sequence[Any]) -> Any:
    """State of consecutive layers; by kind where it is a mapping."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, dict) for part in parts):
        kinds = dict.fromkeys(kind for part in parts for kind in part)
        return {kind: joined([p[kind] for p in parts if kind in p]) for kind in kinds}
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def joined_sums(parts: Sequence[dict[str, Array]], counts: Sequence[int]) -> dict[str, Array]:
    """Sums of consecutive layers; 0 of those that do not give one.

    Args:
        parts: By name, `[layers, ...]`.
        counts: Layers of each.
    """
    if len(parts) == 1:
        return parts[0]
    samples = {name: x for part in parts for name, x in part.items()}

    def of(part: dict[str, Any], count: int, name: str) -> Any:
        empty = jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), samples[name])
        return part.get(name, empty)

    pairs = list(zip(parts, counts, strict=True))
    by_name = {name: [of(*pair, name) for pair in pairs] for name in samples}
    return {name: jax.tree.map(lambda *xs: jnp.concatenate(xs), *x) for name, x in by_name.items()}
