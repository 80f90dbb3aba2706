"""Bytes that a layer of experts sends: formulas against compiled programs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from colossax.aot import collectives, parse_module, totals
from colossax.sharding import use
from colossax.sharding.experts.exchange import PASSES, assumed_turns
from colossax.sharding.experts.island import through_experts
from colossax.sharding.experts.layout import layout_of
from colossax.sharding.experts.traffic import buffer_rows, sent
from tests.cases import quick_first
from tests.sharding.experts.plans import DIMS, MESHES, SPLIT, B, D, Gated, K, S, arrays, plan

F32 = jnp.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Cheap:
    """Experts that need all their arrays and multiply by none: what is sent compiles fast."""

    def __call__(self, local, rows, weight):
        total = sum(
            jnp.sum(w + local.gradients[name] if name in local.gradients else w)
            for name, w in local.arrays.items()
        )
        return rows * weight[:, None] * total


def compiled(bound, layout, compute):
    """Both directions apart, with one pass of each loop: how many loops, and their ring bytes.

    As in loops over layers: in one program, what both gather would be gathered once.
    """
    x, weights, scale, _ = arrays()
    expert = jnp.zeros((B, S, K), jnp.int32)
    tokens = placed(bound, (*layout.tokens, ()), {0: x, 1: scale, 2: expert})
    rest, grad = (
        {
            name: placed(bound, getattr(layout.weights[name], role), {0: w})[0]
            for name, w in weights.items()
        }
        for role in ("rest", "grad")
    )

    def forward(x, weights, scale, expert):
        return through_experts(layout, compute, x, weights, expert, scale)[0]

    def backward(dy, x, weights, scale, expert):
        return jax.vjp(lambda *of: forward(*of, expert), x, weights, scale)[1](dy)

    given = (tokens[0], rest, tokens[1], tokens[2])
    out = tokens[0].sharding
    grads = (out, {name: w.sharding for name, w in grad.items()}, tokens[1].sharding)
    loops, ring, turns = 0, 0, assumed_turns(bound.plan.experts.chunks)
    for lowered in (
        jax.jit(forward, out_shardings=out).lower(*given),
        jax.jit(backward, out_shardings=grads).lower(tokens[0], *given),
    ):
        module, found = parse_module(lowered.compile().as_text()).assuming(PASSES, turns)
        loops += found
        ring += sum(one.ring_bytes for one in totals(collectives(module, bound.mesh)))
    return loops, ring


def placed(bound, split, xs):
    """Shapes, split so."""
    entries = [axes or None for axes in split]
    sharding = jax.sharding.NamedSharding(bound.mesh, jax.sharding.PartitionSpec(*entries))
    return {at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for at, x in xs.items()}


def layout_under(bound):
    shapes = tuple((name, w.shape, DIMS[name]) for name, w in arrays()[1].items())
    return layout_of(bound, (B, S, D), K, float(K), shapes, F32)


CASES = [
    *((mesh, dispatch, None) for mesh in MESHES for dispatch in ("passes", "gather", "weights")),
    *((mesh, "capacity", None) for mesh in ("expert8", "fsdp2-expert4")),
    *(("expert4-tensor2", dispatch, SPLIT) for dispatch in ("passes", "gather", "weights")),
    ("expert4-tensor2", "passes", "expert"),
    ("expert4-tensor2", "gather", "expert"),
    ("expert8", "passes", "chunks 2"),
    ("expert4-tensor2", "passes", "chunks 3"),
    ("expert4-tensor2", "passes", "hierarchical"),
    ("expert8", "passes", "placed"),
]
PLACED = ((3, 0), (3, 1), (2, 3), (4, 7), (3, 5), (6, 3), (0, 3), (1, 3))


QUICK = ("expert8", "capacity", None)


@pytest.mark.parametrize(
    ("mesh", "dispatch", "how"),
    quick_first(CASES, [QUICK], {QUICK: pytest.mark.catches("sent-back-uncounted")}),
)
def test_formulas_are_what_the_program_sends(mesh, dispatch, how):
    group = "expert" if how == "expert" else None
    name = SPLIT if how == SPLIT else None
    chunks = int(how.split()[1]) if "chunks" in str(how) else 1
    more = {"chunks": chunks, "placement": PLACED if how == "placed" else None}
    more["hierarchical"] = how == "hierarchical"
    with use(plan(MESHES[mesh], dispatch, group, name=name, **more)) as bound:
        layout = layout_under(bound)
        # What cheap ones sum of gathered weights, the compiler sums before it gathers.
        compute = Cheap() if (mesh, dispatch, how) == QUICK else Gated()
        loops, ring = compiled(bound, layout, compute)
    shapes = {name: w.shape for name, w in arrays()[1].items()}
    small = 4 * 8 * 12  # loss, and how many passes all devices take
    assert ring == pytest.approx(sent(layout, D, F32, shapes).total, abs=small)
    assert loops == (2 if layout.passes > 1 else 0)


def test_a_buffer_holds_the_load_that_its_capacity_allows():
    with use(plan(MESHES["expert8"], "passes", capacity=1.25)) as bound:
        layout = layout_under(bound)
    assert buffer_rows(layout) == 8 * layout.slots >= 1.25 * B * S * K / 8
