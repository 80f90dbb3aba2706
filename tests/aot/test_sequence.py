"""Rings compiled for H100s that are not there: memory, messages, and what hides them."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from colossax.aot import (
    assert_collectives,
    collectives,
    compile_program,
    exposed_collectives,
    parse_module,
    parse_target,
    target_devices,
)
from colossax.pallas.attention import Mask, Operands, Scoring, merge_blocks, xla
from colossax.pallas.target import target
from colossax.sharding.sequence import (
    DOUBLE_RING_OPTIONS,
    RingAxes,
    Settings,
    ring,
    ring_attention_local,
)

pytestmark = [pytest.mark.aot, pytest.mark.slow]

MIB = 2**20
RANKS = 8  # of a node; a double ring has several
TOKENS, HEADS, KV_HEADS, H = 2048, 32, 8, 128  # per rank
KV = 2 * TOKENS * KV_HEADS * H * 2
"""Bytes of one rank's keys and values in bfloat16."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """`outer` nodes, in each a ring of eight devices."""

    outer: int = 1
    order: str = "zigzag"
    mask: Any = Mask(causal=True)

    @functools.cached_property
    def mesh(self):
        devices = target_devices(parse_target(f"h100:{self.outer}x{RANKS}"))
        devices = np.array(devices).reshape(self.outer, RANKS)
        return Mesh(devices, ("ring_out", "ring"), axis_types=(AxisType.Auto,) * 2)

    def compiled(self, backward, local=None):
        """A forward pass, or that and its gradient, of one layer's attention."""
        axes = RingAxes(
            inner="ring",
            inner_size=RANKS,
            outer="ring_out" if self.outer > 1 else None,
            outer_size=self.outer,
        )
        settings, scoring = Settings(axes=axes, order=self.order), Scoring(scale=H**-0.5)
        spec = P(None, ("ring_out", "ring"))
        attend = jax.shard_map(
            lambda q, k, v: (local or ring_attention_local)(
                Operands(q=q, k=k, v=v, mask=self.mask), scoring, settings
            )[0],
            mesh=self.mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )

        def both(dout, *qkv):
            out, pull = jax.vjp(attend, *qkv)
            return out, pull(dout)

        arrays = [
            jax.ShapeDtypeStruct(
                (1, self.outer * RANKS * TOKENS, heads, H),
                jnp.bfloat16,
                sharding=NamedSharding(self.mesh, spec),
            )
            for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS)
        ]
        with target("gpu", compute_capability=(9, 0)):
            run, given = (both, arrays) if backward else (attend, arrays[1:])
            lowered = jax.jit(run).lower(*given)
        return compile_program(lowered, options=DOUBLE_RING_OPTIONS if self.outer > 1 else None)


@functools.cache
def program(outer=1, order="zigzag", backward=True):
    return Ring(outer, order).compiled(backward)


def test_messages_are_in_the_dtype_of_storage():
    hops = RANKS - 1
    forward = {("collective-permute", "ring"): hops * KV}
    check = functools.partial(assert_collectives, mesh=Ring().mesh, within=0.0)
    check(program(backward=False).hlo, forward)
    # The backward pass has its first hop from the forward pass; gradients are float32.
    check(program().hlo, {("collective-permute", "ring"): (2 * hops - 1) * KV + hops * 2 * KV})


def steps_under_hops(module):
    """For each permute (its first pair of devices, how many kernels or loops it runs under)."""
    found = []
    for body in module.computations.values():
        for place, start in enumerate(body):
            pair = first_pair(module, start)
            if pair:
                end = next(n for n in range(place + 1, len(body)) if reads(body[n], start))
                found.append((pair, sum(map(is_step, body[place:end]))))
    assert found
    return found


def is_step(instruction):
    return instruction.opcode == "while" or is_kernel(instruction)


def is_kernel(instruction):
    return instruction.opcode == "custom-call" and "mosaic_gpu" in instruction.attributes


def first_pair(module, start):
    """`0,1` of a permute's start, be it one of its own or, as of JAX 0.12, the general one."""
    if not start.opcode.endswith("-start"):
        return None
    inside = [one for _, called in start.called for one in module.computations[called]]
    texts = [one.attributes for one in (start, *inside)]
    pairs = re.search(r"source_target_pairs=\{\{(\d+,\d+)\}", " ".join(texts))
    return pairs and pairs.group(1)


def reads(instruction, other):
    return other.name in {name.split("#")[0] for name in instruction.operand_names}


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("backward", [False, True])
def test_every_hop_is_hidden_behind_attention(order, backward):
    module = parse_module(program(1, order, backward).hlo)
    assert exposed_collectives(module, Ring().mesh) == []
    assert all(steps for _, steps in steps_under_hops(module))


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_a_turn_of_the_ring_is_one_permute_around_one_kernel(order):
    """Forward: the loop's body has one start, then the kernel, then its end, and no other loop.

    Nothing but the kernel touches its float32 output: it is merged where it is made, in place.
    """
    module = parse_module(program(1, order, backward=False).hlo)
    (body,) = (
        body
        for body in module.computations.values()
        if any(map(is_kernel, body)) and not any(one.opcode == "while" for one in body)
    )
    starts = [one for one in body if first_pair(module, one)]
    assert len(starts) == sum(map(is_kernel, body)) == sum(map(is_step, body)) == 1
    assert [count for _, count in steps_under_hops(module)] == [1, 1]
    output = f"f32[1,{TOKENS},{HEADS},{H}]"
    touching = {one.opcode for one in body if output in one.shape}
    assert "custom-call" in touching
    assert touching <= {"custom-call", "get-tuple-element", "parameter", "tuple"}


def test_kernels_take_zigzag_order_as_it_lies():
    """Forward and backward: no array is cut into halves and stacked as a pair."""
    for order in ("zigzag", "contiguous"):
        text = program(1, order).hlo
        assert f"[1,{TOKENS},{HEADS},{H}]" in text
        assert f",{TOKENS // 2},{HEADS},{H}]" not in text


@pytest.mark.parametrize("outer", [2, 4])
def test_a_double_ring_hides_outer_hops_behind_turns_of_the_inner_ring(outer):
    module = parse_module(program(outer, backward=False).hlo)
    assert exposed_collectives(module, Ring(outer).mesh) == []
    loops = steps_under_hops(module)
    assert all(count for _, count in loops)
    # A turn is a first step, a loop of steps, and a last one.
    assert {count for pair, count in loops if pair == f"0,{RANKS}"} == {3}


@pytest.mark.parametrize("outer", [2, 4])
def test_backward_a_double_ring_leaves_bare_one_inner_hop_of_keys_a_turn(outer):
    mesh = Ring(outer).mesh
    module = parse_module(program(outer).hlo)
    bare = [c for c in collectives(module, mesh) if not c.overlapped]
    assert {c.axis for c in bare} <= {"ring"}
    assert sum(c.bytes for c in bare) <= (outer - 1) * KV
    along_outer = [count for pair, count in steps_under_hops(module) if pair == f"0,{RANKS}"]
    assert all(along_outer)


def plain_ring(operands, scoring, settings):
    """The forward pass without its gradient's rule."""
    return ring._forward(dataclasses.replace(settings, implementation="xla"), operands, scoring)


def test_its_own_backward_pass_saves_memory(monkeypatch):
    own = program().stats.temp_size_in_bytes
    # The same forward pass; all tiles are visited, so that JAX can differentiate the loops.
    monkeypatch.setattr(xla, "bounds", lambda *_: None)
    plain = Ring().compiled(True, plain_ring).stats.temp_size_in_bytes
    assert own <= 0.3 * plain
    assert own <= 480 * MIB


def test_it_saves_memory_where_only_the_ring_is_differentiated_plainly(monkeypatch):
    """Blocks that have a backward pass of their own, in a ring that has none."""

    def block(operands, scoring, *, implementation, carried):
        out, lse = xla.attend(operands, scoring)
        found = out.astype(jnp.float32), lse
        return found if carried is None else merge_blocks(*carried, *found)

    monkeypatch.setattr("colossax.sharding.sequence.step.forward_block", block)
    plain = Ring().compiled(True, plain_ring).stats.temp_size_in_bytes
    assert program().stats.temp_size_in_bytes <= 0.4 * plain
