"""Rotary embedding: frequencies and their scalings, and that only distances count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.nn import Llama3Scaling, RopeConfig
from colossax.nn.rope import frequencies, rope_tables, rotate

HEAD_DIM = 16


def test_frequencies_fall_from_one_by_the_base():
    wanted = 100.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    found = frequencies(RopeConfig(theta=100.0), HEAD_DIM)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.catches("rope-linear-factor")
def test_a_linear_factor_stretches_positions():
    """At position 4 p an angle is that of position p without it."""
    plain = frequencies(RopeConfig(theta=100.0), HEAD_DIM)
    np.testing.assert_allclose(
        frequencies(RopeConfig(theta=100.0, linear_factor=4.0), HEAD_DIM), plain / 4, rtol=1e-6
    )


@pytest.mark.catches("rope-llama3-factor")
def test_llama3_keeps_short_waves_and_stretches_long_ones():
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    )
    plain = frequencies(RopeConfig(theta=1e4), HEAD_DIM)
    found = frequencies(RopeConfig(theta=1e4, llama3=scaling), HEAD_DIM)
    turns = 64 * plain / (2 * np.pi)  # of a wave over the original length
    np.testing.assert_allclose(found[turns >= 4], plain[turns >= 4], rtol=1e-6)
    np.testing.assert_allclose(found[turns <= 1], plain[turns <= 1] / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    share = (turns[between] - 1) / 3
    wanted = plain[between] * (share + (1 - share) / 8)
    np.testing.assert_allclose(found[between], wanted, rtol=1e-6)
    assert [np.sum(turns >= 4), np.sum(between), np.sum(turns <= 1)] == [1, 2, 5]


@pytest.mark.catches("rope-sign")
def test_scores_depend_on_distance_alone():
    """A rotation by the angle of the position: q turned by s and k by t meet as by s - t."""
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, HEAD_DIM))
    config = RopeConfig(theta=100.0)

    def turned(x, position):
        return rotate(x, rope_tables(jnp.array([[position]]), config, HEAD_DIM))

    def score(s, t):
        return float(jnp.vdot(turned(q, s), turned(k, t)))

    assert score(9, 4) == pytest.approx(score(5, 0), rel=1e-5)
    assert abs(score(9, 4) - score(4, 9)) > 1e-2
    # Counter-clockwise, pairs half a head apart.
    one = jnp.zeros((1, 1, 1, HEAD_DIM)).at[..., 0].set(1.0)
    angle = 3 * frequencies(config, HEAD_DIM)[0]
    found = np.asarray(turned(one, 3)).ravel()
    assert found[[0, HEAD_DIM // 2]] == pytest.approx([np.cos(angle), np.sin(angle)], rel=1e-5)
