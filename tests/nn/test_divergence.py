"""The chunked divergence against logits that are all there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.nn import kl_divergence
from tests.oracle import assert_trees_close

B, S, D, C, V = 2, 7, 8, 6, 11


def given():
    rng = np.random.default_rng(0)
    shapes = ((B, S, D), (D, V), (B, S, C), (C, V))
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    return *arrays, jnp.asarray(rng.integers(0, 2, (B, S)), jnp.float32)


def truth(hidden, head, teacher, teacher_head, weights, t):
    q, p = (jax.nn.softmax(x / t, axis=-1) for x in (hidden @ head, teacher @ teacher_head))
    return jnp.sum(weights[..., None] * p * (jnp.log(p) - jnp.log(q))) * t * t


@pytest.mark.catches("divergence-without-its-temperature")
@pytest.mark.parametrize(("chunks", "temperature"), [(1, 1.0), (3, 2.5)])
def test_it_is_that_of_whole_logits(chunks, temperature):
    own, rest = given()[:2], given()[2:]

    def found(hidden, head):
        return 3 * kl_divergence(hidden, head, *rest, chunks=chunks, temperature=temperature)

    def wanted(hidden, head):
        return 3 * truth(hidden, head, *rest, temperature)

    value, grads = jax.value_and_grad(found, argnums=(0, 1))(*own)
    true, true_grads = jax.value_and_grad(wanted, argnums=(0, 1))(*own)
    assert found(*own) == pytest.approx(float(true), rel=1e-5)
    assert value == pytest.approx(float(true), rel=1e-5)
    assert_trees_close(grads, true_grads)


def test_the_teacher_gets_no_gradient_and_an_equal_one_is_at_zero():
    hidden, head, teacher, teacher_head, weights = given()

    def of(teacher, teacher_head):
        return kl_divergence(hidden, head, teacher, teacher_head, weights)

    for grad in jax.grad(of, argnums=(0, 1))(teacher, teacher_head):
        np.testing.assert_array_equal(grad, 0)
    same, grad = jax.value_and_grad(lambda x: kl_divergence(x, head, hidden, head, weights))(hidden)
    np.testing.assert_allclose(same, 0, atol=1e-6)
    np.testing.assert_allclose(grad, 0, atol=1e-6)


def test_refusals():
    with pytest.raises(ValueError, match="kl_divergence: 8 chunks of 7 tokens"):
        kl_divergence(*given(), chunks=8)
