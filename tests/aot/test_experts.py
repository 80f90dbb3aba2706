"""What experts send on GPUs that are not there, and beside what."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from colossax.aot import (
    collectives,
    compile_program,
    parse_module,
    parse_target,
    target_devices,
)
from colossax.pallas import target
from colossax.sharding import compiler_options, use
from colossax.sharding.experts.exchange import PASSES, assumed_turns
from colossax.sharding.experts.island import through_experts
from colossax.sharding.experts.layout import layout_of
from colossax.sharding.matmul.splits import spec_of
from tests.sharding.experts.plans import DIMS, SPLIT, Gated, plan

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

B, S, D, F, E, K = 8, 1024, 512, 512, 16, 4
BF16 = jnp.dtype("bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A layer for eight H100, forward or with its gradients."""

    layout: object
    bound: object
    program: object

    @property
    def sent(self):
        """Bytes of each collective by kind and axes, balanced loads in one pass or in chunks."""
        turns = assumed_turns(self.bound.plan.experts.chunks)
        module, _ = parse_module(self.program.hlo).assuming(PASSES, turns)
        found = {}
        for one in collectives(module, self.bound.mesh):
            found.setdefault((one.kind, one.axes), []).append(one.bytes)
        return found

    def rows(self, *axes):
        """Bytes of each buffer of rows that is exchanged along these axes."""
        buffer = self.layout.destinations * self.layout.slots * D * 2
        return [each for each in self.sent.get(("all-to-all", axes), []) if each >= buffer]


@functools.cache
def compiled(*, backward, **asked):
    asked = {**asked, "mesh": dict(asked.pop("mesh"))}
    bound = plan(**asked).bind(target_devices(parse_target("h100:1x8")))
    shapes = {"up": (E, D, F), "gate": (E, D, F), "down": (E, F, D)}
    given = tuple((name, shape, DIMS[name]) for name, shape in shapes.items())
    with use(bound), target("gpu", compute_capability=(9, 0)):
        layout = layout_of(bound, (B, S, D), K, float(K), given, BF16)

        def forward(x, weights, scale, expert, dy):
            y, *_ = through_experts(layout, Gated(), x, weights, expert, scale)
            return y

        def both(x, weights, scale, expert, dy):
            _, pull = jax.vjp(lambda *a: forward(*a, expert, dy), x, weights, scale)
            return pull(dy)

        def array(dtype, shape, split):
            sharding = NamedSharding(bound.mesh, spec_of(split))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        tokens = (*layout.tokens, ())
        weights = {
            name: array(jnp.float32, shape, layout.weights[name].rest)
            for name, shape in shapes.items()
        }
        lowered = jax.jit(both if backward else forward).lower(
            array(BF16, (B, S, D), tokens),
            weights,
            array(jnp.float32, (B, S, K), tokens),
            array(jnp.int32, (B, S, K), tokens),
            array(BF16, (B, S, D), tokens),
        )
        program = compile_program(lowered, options=compiler_options(bound))
    return Compiled(layout=layout, bound=bound, program=program)


EXPERT8 = (("expert", 8),)
FOLDED = (("expert", 4), ("tensor", 2))
ROWS = B // 4 * S * K * D * 2
"""Of a device's choices where `tensor` devices have the same tokens, bytes of a balanced load."""


def beside_products(program):
    """Of each exchange how often it runs, and whether products stand within it."""
    module = parse_module(program.hlo)
    turns = {
        name: one.trip_count or 1
        for body in module.computations.values()
        for one in body
        for role, name in one.called
        if role == "body"
    }
    found = []
    for name, body in module.computations.items():
        for place, start in enumerate(body):
            if not starts_exchange(module, start):
                continue
            end = next(n for n in range(place + 1, len(body)) if ends(body[n], start))
            hidden = any(multiplies(module, one) for one in body[place:end])
            found.append((turns.get(name, 1), hidden))
    return found


def starts_exchange(module, one):
    return one.opcode == "all-to-all-start" or (
        one.opcode == "async-start"
        and any(
            inner.opcode in ("all-to-all", "ragged-all-to-all")
            for _, name in one.called
            for inner in module.computations[name]
        )
    )


def ends(one, start):
    return one.opcode.endswith("-done") and start.name in one.operand_names


def multiplies(module, one):
    """Whether it is a matmul, or has one within."""
    kernel = one.opcode in ("custom-call", "fusion")
    if one.opcode == "dot" or (kernel and re.search("gemm|mosaic", one.attributes)):
        return True
    called = (module.computations.get(name, ()) for _, name in one.called)
    return any(multiplies(module, inner) for body in called for inner in body)


@pytest.mark.catches("chunks-one-after-another")
@pytest.mark.parametrize("backward", [False, True])
def test_most_exchanges_of_chunks_stand_beside_products(backward):
    one = compiled(mesh=EXPERT8, dispatch="capacity", capacity=1.0, chunks=8, backward=backward)
    found = beside_products(one.program)
    hidden, all_of_them = (
        sum(turns for turns, under in found if under or every) for every in (False, True)
    )
    # Of eight chunks the first is sent, and the last comes back, beside nothing.
    assert all_of_them >= 8 * (5 if backward else 3)
    assert hidden >= 0.8 * all_of_them


def test_without_chunks_few_exchanges_have_products_beside_them():
    """Weights of rows are not needed before the first product; the rows themselves are."""
    one = compiled(mesh=EXPERT8, dispatch="capacity", capacity=1.0, backward=False)
    found = beside_products(one.program)
    assert len(found) >= 3
    assert sum(hidden for _, hidden in found) <= 1


@pytest.mark.catches("duplicates-sent-along-tensor")
def test_of_tokens_that_tensor_devices_share_each_sends_its_part():
    """Where the experts' features are split over these devices, rows are gathered after that."""
    folded, split = (
        compiled(mesh=FOLDED, group=group, dispatch="capacity", capacity=1.0, backward=True)
        for group in ("expert,tensor", "expert")
    )
    assert folded.rows("expert", "tensor") == 3 * [ROWS // 2]
    assert split.rows("expert") == 3 * [ROWS // 2]


def test_a_folded_group_sends_nothing_along_tensor_alone():
    """Where each of the tensor devices has tokens of its own, as between blocks by sequence."""
    one = compiled(mesh=FOLDED, name=SPLIT, dispatch="capacity", capacity=1.0, backward=True)
    assert one.rows("expert", "tensor") == 3 * [ROWS // 2]
    assert not [axes for _, axes in one.sent if axes == ("tensor",)]


@pytest.mark.catches("axis-by-axis-at-once")
def test_rows_travel_along_inner_axes_and_then_along_the_outermost():
    one = compiled(mesh=FOLDED, hierarchical=True, dispatch="capacity", capacity=1.0, backward=True)
    assert one.rows("tensor") == one.rows("expert") == 3 * [ROWS // 2]
    assert not one.rows("expert", "tensor")
