"""What experts send on GPUs that are not there, beside what, and in how much memory."""

import dataclasses
import functools

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
from colossax.sharding.experts.island import through_experts
from colossax.sharding.experts.layout import layout_of
from colossax.sharding.matmul.splits import spec_of
from tests.sharding.experts.plans import DIMS, Gated, plan

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
        """Collectives by kind and axes: bytes of payload, loops of unknown length once."""
        module = parse_module(self.program.hlo).with_trip_count(1)
        found = {}
        for one in collectives(module, self.bound.mesh):
            found.setdefault((one.kind, one.axes), []).append(one.bytes * 1)
        return {key: sorted(each) for key, each in found.items()}


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


def beside_products(program):
    """Of each all-to-all of rows: whether a loop or kernel of products stands within it."""
    module = parse_module(program.hlo)
    found = []
    for body in module.computations.values():
        for place, start in enumerate(body):
            if not starts_exchange(module, start):
                continue
            end = next(n for n in range(place + 1, len(body)) if ends(body[n], start))
            found.append(any(multiplies(module, one) for one in body[place:end]))
    return found


def starts_exchange(module, one):
    if one.opcode == "all-to-all-start":
        return True
    called = [name for role, name in one.called]
    return one.opcode == "async-start" and any(
        inner.opcode == "all-to-all" for name in called for inner in module.computations[name]
    )


def ends(one, start):
    return one.opcode.endswith("-done") and start.name in one.operand_names


def multiplies(module, one):
    """Whether it is, or has within, a matmul."""
    if one.opcode == "dot" or (
        one.opcode == "custom-call" and ("gemm" in one.attributes or "mosaic" in one.attributes)
    ):
        return True
    if "gemm" in one.attributes and one.opcode == "fusion":
        return True
    return any(
        multiplies(module, inner)
        for _, name in one.called
        for inner in module.computations.get(name, ())
    )


@pytest.mark.catches("chunks-one-after-another")
@pytest.mark.parametrize("backward", [False, True])
def test_most_exchanges_of_chunks_stand_beside_products(backward):
    one = compiled(mesh=EXPERT8, dispatch="capacity", capacity=1.0, chunks=8, backward=backward)
    found = beside_products(one.program)
    print(backward, found)
    assert sum(found) >= 0.8 * len(found)
