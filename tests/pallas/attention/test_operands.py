"""An implementation of one's own is a module with `why_not` and functions of two values."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import (
    Mask,
    Operands,
    Scoring,
    api,
    attention,
    block,
    forward_block,
    reference,
)

KEYS = jax.random.split(jax.random.key(3), 7)


def drawn(i, *shape):
    return jax.random.normal(KEYS[i], shape)


def toy(seen):
    """Attention by the definition, which keeps what it was given."""
    found = types.ModuleType("toy")
    found.why_not = lambda spec, target: None

    def attend(operands, scoring):
        seen.append((operands, scoring))
        return reference.attend(operands, scoring)

    def attend_block(operands, scoring, *, carried):
        assert carried is None
        return attend(operands, scoring)

    found.attend, found.attend_block = attend, attend_block
    return found


FIELDS = {
    "scale": 0.4,
    "soft_cap": 2.0,
    "alibi_slopes": jnp.asarray([0.1, 0.2, 0.3, 0.4]),
    "sinks": drawn(3, 4),
    "biases": (drawn(4, 1, 4, 9, 1), drawn(5, 3, 1, 9, 9)),
}


@pytest.mark.catches("scoring-loses-biases")
def test_an_implementation_of_ones_own_gets_every_part_of_the_call(monkeypatch):
    seen = []
    monkeypatch.setitem(api.IMPLEMENTATIONS, "toy", toy(seen))
    monkeypatch.setitem(block._FORMS, "toy", toy(seen))
    q, k, v = drawn(0, 3, 9, 4, 8), drawn(1, 3, 9, 2, 8), drawn(2, 3, 9, 2, 5)
    mask = Mask(causal=True, kv_valid=jnp.arange(9)[None] < 7)
    found = attention(q, k, v, mask=mask, **FIELDS, implementation="toy")
    expected = attention(q, k, v, mask=mask, **FIELDS, implementation="xla")
    np.testing.assert_allclose(found, expected, atol=2e-6)
    (operands, scoring) = seen.pop()
    assert operands.mask is mask and operands.lengths == (9, 9)
    for name, given in FIELDS.items():
        assert jax.tree.all(jax.tree.map(np.array_equal, getattr(scoring, name), given)), name
    whole, plain = Operands(q=q, k=k, v=v, mask=mask), Scoring.of(q)
    forward_block(whole, plain, implementation="toy")
    assert seen == [(whole, plain)] and np.isclose(plain.scale, 8**-0.5)


def test_both_values_are_trees_of_arrays():
    """They cross transformations as they are; scale and soft cap are part of what is traced."""
    q, k, v = drawn(0, 1, 9, 4, 8), drawn(1, 1, 9, 2, 8), drawn(2, 1, 9, 2, 5)
    operands, scoring = Operands(q=q, k=k, v=v, mask=Mask()), Scoring.of(q, sinks=FIELDS["sinks"])
    assert len(jax.tree.leaves((operands, scoring))) == 4
    out = jax.jit(api.attend)(operands, scoring)
    np.testing.assert_allclose(out, jax.jit(attention)(q, k, v, mask=Mask(), sinks=scoring.sinks))
