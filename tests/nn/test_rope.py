"""Rotary embedding: frequencies and their scalings, and that only distances count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.nn import Llama3Scaling, RopeConfig, YarnScaling
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


@pytest.mark.catches("rope-llama3-no-blend")
def test_llama3_with_nothing_between_takes_one_step():
    """By a loop over waves: Llama 4 has both factors 1."""
    scaling = Llama3Scaling(
        factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_positions=64
    )
    wanted = []
    for at in range(HEAD_DIM // 2):
        radians = 1e4 ** (-2 * at / HEAD_DIM)
        wavelength = 2 * np.pi / radians
        wanted.append(radians / 16 if wavelength > 64 / 1.0 else radians)
    found = frequencies(RopeConfig(theta=1e4, llama3=scaling), HEAD_DIM)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    plain = frequencies(RopeConfig(theta=1e4), HEAD_DIM)
    assert (found == plain).sum() == 3 and found.dtype == np.float32


@pytest.mark.catches("rope-yarn-factor")
@pytest.mark.parametrize(("truncate", "ends"), [(True, (1, 6)), (False, (1.2, 5.2))])
def test_yarn_keeps_what_turns_often_and_stretches_what_turns_seldom(truncate, ends):
    """By dims: of 16 with base 100 the one of t turns in 128 is 8 log_100(128 / (2 pi t))."""
    yarn = YarnScaling(
        factor=4.0, original_max_positions=128, beta_fast=10.2, beta_slow=1.0, truncate=truncate
    )
    plain = frequencies(RopeConfig(theta=100.0), HEAD_DIM)
    found = frequencies(RopeConfig(theta=100.0, yarn=yarn), HEAD_DIM)
    dims = [8 * np.log(128 / (2 * np.pi * turns)) / np.log(100) for turns in (10.2, 1.0)]
    low, high = (np.floor(dims[0]), np.ceil(dims[1])) if truncate else dims
    assert (low, high) == pytest.approx(ends, abs=0.1)
    kept = np.clip((high - np.arange(HEAD_DIM // 2)) / (high - low), 0, 1)
    np.testing.assert_allclose(found, plain * kept + plain / 4 * (1 - kept), rtol=1e-5)


def test_magnitudes_of_yarn():
    """0.1 m ln(40) + 1: of DeepSeek-V2 both are of 0.707 and cancel; logits have their square."""
    yarn = functools.partial(YarnScaling, factor=40.0, original_max_positions=4096)
    one = 0.1 * np.log(40) + 1
    assert yarn().magnitude == pytest.approx(one) and yarn().softmax_scale == 1.0
    both = yarn(mscale=0.707, mscale_all_dim=0.707)
    assert both.magnitude == 1.0
    assert both.softmax_scale == pytest.approx((0.0707 * np.log(40) + 1) ** 2)
    assert yarn(attention_factor=0.5).magnitude == 0.5
    tables = rope_tables(jnp.array([[0]]), RopeConfig(yarn=yarn()), HEAD_DIM)
    np.testing.assert_allclose(tables[0], one, rtol=1e-6)


@pytest.mark.catches("rope-neighbours")
def test_neighbours_turn_as_dims_half_a_head_apart_do():
    """What comes out has them apart: so a head sorted beforehand gives the same."""
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, HEAD_DIM))
    tables = rope_tables(jnp.arange(3)[None], RopeConfig(theta=100.0), HEAD_DIM)
    by_hand = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    np.testing.assert_array_equal(rotate(x, tables, interleaved=True), rotate(by_hand, tables))


@pytest.mark.catches("yarn-log-of-one")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: YarnScaling(factor=2.0, original_max_positions=8, beta_fast=1.0),
            "give more than",
        ),
        (
            lambda: RopeConfig(
                llama3=Llama3Scaling(), yarn=YarnScaling(factor=2.0, original_max_positions=8)
            ),
            "found llama3 and yarn, two scalings",
        ),
        (
            lambda: Llama3Scaling(high_freq_factor=0.5),
            "found 0.5; give at least low_freq_factor, 1",
        ),
        (
            lambda: RopeConfig(theta=1.0, yarn=YarnScaling(factor=2.0, original_max_positions=8)),
            "rope.theta: found 1.0, with which YaRN's .* give more than 1",
        ),
    ],
)
def test_wrong_scalings_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


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
