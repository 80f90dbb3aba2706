"""Log-probabilities made chunk by chunk against logits that are all there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.nn import cross_entropy, token_logps
from tests.oracle import assert_trees_close

B, S, D, V = 2, 7, 8, 11


def given():
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, S, D), (D, V))]
    bias = jnp.asarray(rng.normal(size=V), jnp.float32)
    return *arrays, bias, jnp.asarray(rng.integers(0, V, (B, S)), jnp.int32)


def truth(hidden, head, bias, targets, *, soft_cap, temperature):
    logits = hidden @ head + bias
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    every = jax.nn.log_softmax(logits / temperature, axis=-1)
    return jnp.take_along_axis(every, targets[..., None], axis=-1)[..., 0]


def judged(logps):
    """Any function of them that is no sum: an answer's weight depends on its others."""
    return jnp.sum(jax.nn.log_sigmoid(jnp.sum(logps * jnp.arange(S), axis=-1)))


@pytest.mark.catches("logps-without-their-temperature")
@pytest.mark.parametrize("vocab_sharded", [False, True])
@pytest.mark.parametrize(
    ("chunks", "soft_cap", "temperature"),
    [(1, None, 1.0), (3, 2.0, 1.0), (3, None, 0.7), (2, 3.0, 1.5)],
)
def test_they_are_those_of_whole_logits(chunks, soft_cap, temperature, vocab_sharded):
    *own, targets = given()

    def found(hidden, head, bias):
        return token_logps(
            hidden,
            head,
            targets,
            bias=bias,
            chunks=chunks,
            soft_cap=soft_cap,
            temperature=temperature,
            vocab_sharded=vocab_sharded,
        )

    def wanted(*own):
        return truth(*own, targets, soft_cap=soft_cap, temperature=temperature)

    np.testing.assert_allclose(found(*own), wanted(*own), rtol=2e-5, atol=2e-6)
    grads = jax.grad(lambda *own: judged(found(*own)), argnums=(0, 1, 2))(*own)
    assert_trees_close(grads, jax.grad(lambda *own: judged(wanted(*own)), argnums=(0, 1, 2))(*own))


def test_their_sum_is_the_cross_entropy():
    hidden, head, _, targets = given()
    weights = jnp.asarray(np.random.default_rng(1).integers(0, 2, (B, S)), jnp.float32)

    def of_logps(*own):
        return -jnp.sum(weights * token_logps(*own, targets, chunks=2))

    def of_loss(*own):
        return cross_entropy(*own, targets, weights, chunks=2)[0]

    for pair in zip(
        *(jax.value_and_grad(of, argnums=(0, 1))(hidden, head) for of in (of_logps, of_loss)),
        strict=True,
    ):
        assert_trees_close(*pair)


def test_logits_are_never_whole():
    """Temporary memory falls with the number of chunks, forward and backward."""
    b, s, d, v = 2, 2048, 16, 4096
    shapes = [
        jax.ShapeDtypeStruct((b, s, d), jnp.float32),
        jax.ShapeDtypeStruct((d, v), jnp.float32),
        jax.ShapeDtypeStruct((b, s), jnp.int32),
    ]

    def temporary(chunks, *, backward):
        def total(*own):
            return jnp.sum(jnp.square(token_logps(*own, chunks=chunks)))

        made = jax.grad(total, (0, 1)) if backward else total
        compiled = jax.jit(made).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = b * s * v * 4
    for backward in (False, True):
        assert temporary(1, backward=backward) >= logits
        assert temporary(16, backward=backward) < 3 * logits / 16


def test_refusals():
    hidden, head, _, targets = given()
    with pytest.raises(ValueError, match="token_logps: 8 chunks of 7 tokens"):
        token_logps(hidden, head, targets, chunks=8)
