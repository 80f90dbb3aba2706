"""The decoder's parts as its configuration names them, and the FLOPs it counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.errors import InputError
from colossax.nn import (
    Decoder,
    DecoderConfig,
    DynamicScaling,
    LatentConfig,
    LongScaling,
    RopeConfig,
)
from colossax.nn.decoder.shapes import attention_shape
from colossax.sharding import RowOrder, in_order

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


STRETCHED = {
    "dynamic": RopeConfig(dynamic=DynamicScaling(factor=4.0, original_max_positions=4)),
    "long": RopeConfig(
        long=LongScaling(short=(1.0, 1.0), long=(3.0, 5.0), original_max_positions=4)
    ),
}


@pytest.mark.catches("length-of-all-sequences")
@pytest.mark.parametrize("name", STRETCHED)
def test_a_packed_document_has_a_length_of_its_own(name):
    """One of three tokens, below the length from which on it matters, and one of five."""
    model = decoder(rope=STRETCHED[name], init_std=0.5)
    segments, positions = jnp.asarray([[0] * 3 + [1] * 5]), jnp.asarray([[*range(3), *range(5)]])
    packed = model(TOKENS, positions=positions, segments=segments)[0]
    np.testing.assert_allclose(packed[:3], model(TOKENS[:, :3])[0], atol=1e-5)
    np.testing.assert_allclose(packed[3:], model(TOKENS[:, 3:])[0], atol=1e-5)
    as_one = model(TOKENS, positions=positions)[0]
    assert np.abs(as_one[:3] - packed[:3]).max() > 1e-3


@pytest.mark.catches("fillers-lengthen")
def test_what_a_row_is_filled_up_with_is_no_part_of_its_length():
    model = decoder(rope=STRETCHED["dynamic"], init_std=0.5)
    with in_order(RowOrder(padding=3)):
        filled = model(jnp.pad(TOKENS[:, :5], ((0, 0), (0, 3))))[0, :5]
    np.testing.assert_allclose(filled, model(TOKENS[:, :5])[0], atol=1e-5)
    assert np.abs(filled - model(TOKENS)[0, :5]).max() > 1e-3


LATENT = {"latent": LatentConfig(kv_rank=8, nope_dim=2, rope_dim=2, v_dim=4), "rope": RopeConfig()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norms": "outputs"}, "norms 'outputs' is unknown; did you mean 'output'"),
        ({"shared_norm": True}, "model.shared_norm: attention and MLP have one norm where both"),
        ({"parallel": True, "norms": "sum"}, "model.norms: 'sum' norms what attention added to"),
        ({"full_layers": (0, 1)}, "model.full_layers: found 1 of 1 layers; give 0 to 0"),
        ({"norm": "layer", "norm_from_one": True}, "model.norm_from_one: norm is 'layer', whose"),
        ({"qk_norm": True, "qk_norm_layer": True}, "qk_norm and qk_norm_layer norm the same; give"),
        ({"local_rope": RopeConfig()}, "model.local_rope: it is in place of rope in some layers"),
        ({"rope": RopeConfig(dims=6)}, "6 of head_dim 4 are to turn; choose an even number"),
        (
            {"rope": RopeConfig(dynamic=STRETCHED["dynamic"].dynamic, dims=2)},
            "needs two frequencies or more, and 2 dims turn; let 4 or more",
        ),
        ({**LATENT, "score_cap": 3.0}, "latent attention goes with score_cap in no model here"),
        ({**LATENT, "local_rope": RopeConfig()}, "latent attention goes with local_rope in no"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_kinds_are_told_by_what_layers_differ_in():
    def kinds(**changes):
        config = dataclasses.replace(CONFIG, layers=2, full_layers=(1,), rope=RopeConfig())
        return dataclasses.replace(config, **changes).layer_kinds

    assert kinds() == ()
    assert kinds(window=3) == kinds(local_rope=RopeConfig(theta=9.0)) == ("local", "full")
    assert kinds(full_rope=False) == ("rope", "nope")


def test_each_rope_says_itself_which_dims_turn_together():
    """Neighbours in one kind of layer, halves in the other."""
    config = dataclasses.replace(
        CONFIG, rope=RopeConfig(), local_rope=RopeConfig(interleaved=True), full_layers=()
    )
    assert attention_shape(config).interleaved and not attention_shape(config, True).interleaved
