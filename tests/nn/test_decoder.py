"""The decoder's parts as its configuration names them, and the FLOPs it counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.nn import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    vocab=16, embed=8, layers=1, heads=2, kv_heads=2, head_dim=4, mlp=8, max_seq=8, init_std=1.0
)
TOKENS = jnp.arange(8)[None]


def decoder(**changes):
    return Decoder(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


@pytest.mark.catches("window-one-more")
@pytest.mark.parametrize("window", [None, 3])
def test_a_window_counts_the_query_itself(window):
    """Of one layer, the last token's output depends on as many tokens."""
    model = decoder(window=window)

    def last(embeddings):
        return jnp.sum(model.hidden(embeddings=embeddings)[0][0, -1] ** 3)

    moved = np.asarray(jax.grad(last)(model.embed(TOKENS)))[0]
    assert np.flatnonzero(np.abs(moved).max(-1)).tolist() == list(range(8 - (window or 8), 8))


@pytest.mark.catches("positions-offset")
def test_the_first_rows_of_a_position_table_may_be_left_out():
    model = decoder(learned_positions=10, position_offset=2)
    table = model.positions.table

    def outputs(scale):
        values = table[...] * jnp.asarray(scale)[:, None]
        model.positions.table = nnx.Param(values, **table.get_metadata())
        return np.asarray(model.hidden(TOKENS)[0])[0]

    same = outputs([1] * 10)
    np.testing.assert_array_equal(outputs([9, 9] + [1] * 8), same)
    moved = np.abs(outputs([1] * 9 + [9]) - same).max(-1)
    assert (moved > 0).tolist() == [False] * 7 + [True]


@pytest.mark.catches("flops-of-attention")
@pytest.mark.parametrize("window", [None, 3, 100])
def test_flops_count_the_keys_that_are_seen(window):
    """Scores and sums of values: 2 FLOPs an item each, forward once and backward twice."""
    config = dataclasses.replace(CONFIG, layers=3, window=window)
    seen = np.mean([min(i + 1, window or 50) for i in range(50)])
    wanted = config.flops_per_token + 3 * 2 * 2 * config.layers * 2 * 4 * seen
    assert config.train_flops_per_token(50) == int(wanted)
    matrices = 3 * (4 * 8 * 8 + 3 * 8 * 8) + 8 * 16
    assert config.flops_per_token == 6 * matrices
