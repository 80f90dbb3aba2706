"""Keys of a factory are those of `nnx.Rngs`, at a cost that does not grow with what was traced."""

import jax
import pytest
from flax import nnx

from colossax.nn.rngs import fresh_rngs


def split_keys(rngs):
    """Of three; without graph updates Flax makes other streams of them."""
    if not nnx.set_graph_updates.current_value():
        return nnx.split_rngs(rngs, splits=3).params.key[...]
    with nnx.split_rngs(rngs, splits=3):
        return rngs.params.key[...]


def drawn(rngs):
    """Keys as bits: of the default stream and a named one, of forks, of splits, and after them."""
    keys = [rngs.params(), rngs(), rngs.dropout(), rngs["default"]()]
    fork = rngs.fork()
    keys += [fork.params(), fork.params(), rngs.params()]
    keys += [split_keys(rngs), rngs.params()]
    layers = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: rngs.params(), in_axes=0))
    keys += [layers(rngs), rngs.params()]
    return [jax.random.key_data(key) for key in keys]


@pytest.mark.parametrize("run", [lambda f: f(), jax.jit], ids=["eager", "traced"])
@pytest.mark.parametrize("seed", [0, jax.random.key(7)], ids=["number", "key"])
def test_keys_are_those_of_flax(seed, run):
    expected, found = (run(lambda make=make: drawn(make(seed))) for make in (nnx.Rngs, fresh_rngs))
    expected, found = (one() if callable(one) else one for one in (expected, found))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), expected, found))


def made_of(rngs):
    attention = nnx.MultiHeadAttention(2, 8, decode=False, dropout_rate=0.1, rngs=rngs)
    return attention.query.kernel[...], nnx.Linear(8, 8, rngs=rngs).kernel[...]


class Asked(Exception):
    """A traced array was asked for its layout."""


@pytest.mark.catches("keys-drawn-slowly")
def test_no_traced_array_is_asked_for_its_layout(monkeypatch):
    """For the message that refuses it JAX goes through all that was traced before."""

    def asked(self):
        raise Asked

    monkeypatch.setattr(jax.core.Tracer, "sharding", property(asked))
    jax.eval_shape(lambda: made_of(fresh_rngs(0)))
    with pytest.raises(Asked):
        jax.eval_shape(lambda: made_of(nnx.Rngs(0)))
