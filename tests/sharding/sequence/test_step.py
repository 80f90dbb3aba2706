"""One step of a ring by the kernels, interpreted, is that of XLA; no device but one is needed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Mask, Operands, Scoring, row_delta
from colossax.sharding.sequence.axes import RingAxes
from colossax.sharding.sequence.settings import Settings
from colossax.sharding.sequence.step import Step
from tests.pallas.places import everywhere, no_races

RANKS, RANK, TOKENS, HEADS, H = 4, 1, 128, 1, 64
MASK = Mask(causal=True)


@dataclasses.dataclass(frozen=True)
class Place(RingAxes):
    """A ring seen from one of its ranks."""

    def source_local(self, outer_offset=0, inner_offset=0):
        return jnp.asarray((RANK - inner_offset) % self.inner_size)


def both_directions(implementation, source, arrays):
    """One's own step and that of another rank's keys, then its gradients."""
    q, own, other, dout = arrays
    settings = Settings(
        axes=Place(inner="ring", inner_size=RANKS),
        order="zigzag",
        implementation=implementation,
    )
    scoring = Scoring(scale=H**-0.5)
    here = Operands(q=q, k=own[0], v=own[1], mask=MASK)
    step = Step.of(settings, here, scoring)
    number = (RANK - source) % RANKS
    out, lse = step.forward_local(other, number, step.own_forward_local(own))
    delta = row_delta(out, lse, dout, jnp.zeros_like(lse))
    step = Step.of(settings, here, scoring, dout=dout, lse=lse, delta=delta)
    (dq, _), dkv = step.backward_local(other, number)
    return out, lse, dq, dkv


@everywhere
@pytest.mark.parametrize("source", [0, 3])
def test_it_is_that_of_pairs_of_halves(source, place):
    """Keys from before this rank, which all queries see in part, and from behind it."""
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(
        lambda _: jnp.asarray(rng.normal(size=(1, TOKENS, HEADS, H)), jnp.bfloat16),
        (0, (0, 0), (0, 0), 0),
    )
    run = jax.jit(both_directions, static_argnums=(0, 1))
    text = str(jax.make_jaxpr(run, static_argnums=(0, 1))(place, source, arrays))
    assert f"[2,{TOKENS // 2},{HEADS},{H}]" not in text
    found, expected = (run(name, source, arrays) for name in (place, "xla"))
    assert no_races(place)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.linalg.norm(one - other) < 5e-3 * jnp.linalg.norm(other)
