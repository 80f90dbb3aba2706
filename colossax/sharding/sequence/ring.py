"""Ring attention: queries stay, keys and values travel around the devices.

One engine serves the single and the double ring, zigzag and contiguous order, every mask. Shapes
are those of one rank of R = O I: s queries and t keys, their natural indices given by the order.

Every step is attention to the keys of one rank (step.py), merged in float32 into what the steps
before it found: by the kernels as they go, else by a pass of its own.

Reference: Liu et al. 2023, Ring Attention with Blockwise Transformers; the double ring is that of
Gu et al. 2024, LoongTrain.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from colossax.pallas.attention import Operands, Scoring, row_delta, with_sinks

from .axes import Circle, Packing
from .settings import Settings
from .step import Step

DOUBLE_RING_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
"""Compiler options of a program with a double ring. XLA has one collective in flight otherwise, and
hides a hop between nodes behind one step at most; with two it hides it, forward, behind a whole
turn of the inner ring. tests/aot/test_sequence.py looks at the schedules for nodes of 8 H100."""


def ring_attention_local(
    operands: Operands, scoring: Scoring, settings: Settings
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Exact softmax attention of one rank's queries to the keys of all R ranks.

    Positions that the mask leaves out are natural indices, which follow from rank and order. Arrays
    of the mask are this rank's part, those of keys are gathered unless the mask carries what comes
    of them (`ring_masks_local`). Steps in which no rank sees a key through a window of natural
    indices are left out with their hops (single ring).

    Returns:
        Output in q's dtype and the float32 log-partition, sinks included; both differentiable.

    Raises:
        ValueError: The order is unknown or cannot be had with these lengths.
        NotImplementedError: The implementation named does not take a step, says why.

    Cost, per device: KV = b t k (h + hv) items of k's dtype. Forward sends (R - 1) KV; backward
    (R - 1) KV again and (R - 1) KV of float32 gradients; in a double ring O - 1 of the R - 1 hops
    run along the outer axis. Residuals are q, k, v, the output and 4 bytes per query and head.
    XLA may keep the forward pass's first hop for the backward pass where both are in one
    computation. tests/sharding/sequence/test_bytes.py counts all of it. On GPUs attention hides
    every hop, but for one inner hop of KV a turn in the backward pass of a double ring, which wants
    `DOUBLE_RING_OPTIONS`.
    """
    settings.check(operands)
    out, lse = _ring(settings, operands, scoring.without_sinks)
    return (out, lse) if scoring.sinks is None else with_sinks(out, lse, scoring.sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(settings: Settings, operands: Operands, scoring: Scoring) -> Any:
    return _forward(settings, operands, scoring)


def _ring_fwd(settings: Settings, operands: Operands, scoring: Scoring) -> Any:
    outputs = _forward(settings, operands, scoring)
    out, lse = (checkpoint_name(x, "attention") for x in outputs)
    return (out, lse), (operands, scoring, out, lse)


def _ring_bwd(settings: Settings, saved: Any, cotangents: Any) -> Any:
    operands, scoring, out, lse = saved
    dout, dlse = cotangents
    delta = row_delta(out, lse, dout, dlse)
    dq, dk, dv, of_scoring = _backward(settings, operands, scoring, dout, lse, delta)
    return operands.gradients(dq, dk, dv), of_scoring


_ring.defvjp(_ring_fwd, _ring_bwd)


def _forward(settings: Settings, operands: Operands, scoring: Scoring) -> tuple[Array, Array]:
    axes, keys = settings.axes, (operands.k, operands.v)
    step = Step.of(settings, operands, scoring)
    packing = Packing.of(keys)

    def visit(state: Any, packed: Any, a: Any, b: Any) -> Any:
        return step.forward_local(packing.unpack(packed), a * axes.inner_size + b, state)

    def sweep(state: Any, packed: Any, a: Any, offsets: Sequence[int]) -> Any:
        """Along the inner ring, with keys from `a` places back on the outer one."""
        return _travel(
            axes.inner_circle, packed, offsets, lambda s, p, b, _: visit(s, p, a, b), state
        )

    def outer_visit(state: Any, packed: Any, a: Any, _: int) -> Any:
        return sweep(visit(state, packed, a, 0), packed, a, range(1, axes.inner_size))

    packed = packing.pack(keys)
    state = sweep(step.own_forward_local(keys), packed, 0, step.inner_offsets)
    out, lse = _travel(axes.outer_circle, packed, range(1, axes.outer_size), outer_visit, state)
    return out.astype(operands.q.dtype), lse


def _backward(
    settings: Settings,
    operands: Operands,
    scoring: Scoring,
    dout: Array,
    lse: Array,
    delta: Array,
) -> tuple[Array, Array, Array, Scoring]:
    """All in float32.

    Gradients of keys follow one hop behind them, as the sum of what the visited devices added, and
    a last hop takes them home. What a device adds to the keys with which a ring starts does not
    travel along it: that is computed under the last hop, so that something hides it.
    """
    axes, keys = settings.axes, (operands.k, operands.v)
    inner, outer = axes.inner_circle, axes.outer_circle
    step = Step.of(settings, operands, scoring, dout=dout, lse=lse, delta=delta)
    packing = Packing.of(keys)

    def visit(of_queries: Any, packed: Any, a: Any, b: Any) -> tuple[Any, Any]:
        gradients, dkv = step.backward_local(packing.unpack(packed), a * axes.inner_size + b)
        return _add(of_queries, gradients), dkv

    def sweep(of_queries: Any, packed: Any, a: Any, offsets: Sequence[int]) -> tuple[Any, Any]:
        """Along the inner ring, with keys from `a` places back on the outer one."""

        def inner_visit(state: Any, packed: Any, b: Any, hop: int) -> tuple[Any, Any]:
            of_queries, dkv = state
            moved = inner.shift_local(dkv, hop)
            of_queries, added_dkv = visit(of_queries, packed, a, b)
            return of_queries, _add(moved, added_dkv)

        state = (of_queries, None)
        of_queries, dkv = _travel(inner, packed, offsets, inner_visit, state, first_alone=True)
        return of_queries, inner.shift_local(dkv, axes.inner_size - max(offsets, default=0))

    def outer_visit(state: Any, packed: Any, a: Any, hop: int) -> tuple[Any, Any]:
        of_queries, dkv = state
        moved = outer.shift_local(dkv, hop)
        of_queries, travelled = sweep(of_queries, packed, a, range(1, axes.inner_size))
        of_queries, first = visit(of_queries, packed, a, 0)
        return of_queries, _add(moved, _add(travelled, first))

    packed, state = packing.pack(keys), (None, None)
    if axes.outer_size > 1:
        offsets = range(1, axes.outer_size)
        state = _travel(outer, packed, offsets, outer_visit, state, first_alone=True)
        state, packed = jax.lax.optimization_barrier((state, packed))
    of_queries, dkv = state
    dkv = outer.shift_local(dkv, 1)
    of_queries, travelled = sweep(of_queries, packed, 0, step.inner_offsets)
    gradients, local_dkv = step.own_backward_local(keys)
    (dq, of_scoring), dkv = _add(of_queries, gradients), _add(_add(dkv, travelled), local_dkv)
    return dq, *packing.unpack(dkv), of_scoring


def _travel(
    circle: Circle,
    packed: tuple[Array, ...],
    offsets: Sequence[int],
    visit: Callable[[Any, Any, Any, int], Any],
    state: Any,
    *,
    first_alone: bool = False,
) -> Any:
    """Visit what lies `offset` places back, for each offset in ascending order.

    `visit(state, packed, number, hop)`, numbered from 1, sees the arrays `hop` places after the
    visit before. Their next hop depends on no visit, so the compiler can hide it behind one. Visits
    between equal hops are the iterations of a loop; `first_alone` keeps the first out of it, for a
    state that only visits complete.
    """
    if not offsets:
        return state
    hops = np.diff([0, *offsets]).tolist()
    stops = list(zip(range(1, len(hops) + 1), hops, [*hops[1:], 0], strict=True))
    alone = stops[0] if first_alone else None

    def stop(carry: Any, number: Any, came: int, goes: int) -> Any:
        state, packed = carry
        following = circle.shift_local(packed, goes) if goes else packed
        return visit(state, packed, number, came), following

    carry = state, circle.shift_local(packed, hops[0])
    for (_, came, goes), group in itertools.groupby(stops, lambda s: (s == alone, *s[1:])):
        # Else XLA would combine hops of several visits and wait for all of them at the first.
        carry = jax.lax.optimization_barrier(carry)
        numbers = [number for number, _, _ in group]
        if len(numbers) == 1:
            carry = stop(carry, numbers[0], came, goes)
        else:
            one = functools.partial(_scanned, stop, came, goes)
            carry, _ = jax.lax.scan(one, carry, jnp.asarray(numbers, jnp.int32))
    return carry[0]


def _scanned(stop: Callable[..., Any], came: int, goes: int, carry: Any, number: Array) -> Any:
    return stop(carry, number, came, goes), None


def _add(one: Any, two: Any) -> Any:
    """The sum of two trees, None being nothing."""
    if one is None or two is None:
        return two if one is None else one
    return jax.tree.map(jnp.add, one, two)
