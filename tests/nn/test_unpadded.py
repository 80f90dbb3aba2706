"""Rows packed with documents give what padded rows do, for the work of their real tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.models import BERTConfig, ModernBERTConfig, maker
from colossax.nn import HeadConfig, describe, pure
from colossax.pallas.attention import Mask, dense
from colossax.planner.counting.traced_flops import traced_flops
from tests.cases import quick_first
from tests.oracle import assert_trees_close

LENGTHS = (32, 9, 23, 16, 8, 8, 20, 12)
WIDTH = 32
SIZES = {"vocab": 64, "embed": 32, "layers": 3, "heads": 4, "mlp": 64, "max_seq": WIDTH}
CLASSES = HeadConfig(outputs=3, pool="mean")
MODELS = {
    "bert": BERTConfig(**SIZES, init_std=0.3),
    "modernbert": ModernBERTConfig(**SIZES, init_std=0.3, window=8),
    "classes": BERTConfig(**SIZES, init_std=0.3, head=CLASSES),
}


def padded():
    """A document a row."""
    tokens = np.random.default_rng(0).integers(0, 64, (len(LENGTHS), WIDTH)).astype(np.int32)
    real = np.arange(WIDTH) < np.asarray(LENGTHS)[:, None]
    positions = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), tokens.shape)
    return {
        "tokens": tokens,
        "segments": np.where(real, 0, -1).astype(np.int32),
        "positions": positions,
    }


ROWS = ((0,), (1, 2), (3, 4, 5), (6, 7))
"""Documents of each packed row, which fill it."""


def packed():
    """The same documents, one after another in rows that they fill."""
    apart = padded()
    rows = {name: [] for name in apart}
    for row in ROWS:
        for name, source in apart.items():
            parts = [source[document, : LENGTHS[document]] for document in row]
            if name == "segments":
                parts = [part + number for number, part in enumerate(parts)]
            rows[name].append(np.concatenate(parts))
    return {name: np.stack(parts) for name, parts in rows.items()}


def ran(model):
    spec = describe(maker(MODELS[model]))
    params = pure(maker(MODELS[model])(nnx.Rngs(0)))

    def run(params, tokens, positions, segments):
        made = spec.merge(params)
        hidden, _ = made.hidden(tokens, positions=positions, segments=segments)
        if model == "classes":
            return made.told(hidden, segments=segments, documents=3)
        return made.logits(hidden)

    return params, jax.jit(run)


@pytest.mark.catches("packed-documents-meet")
@pytest.mark.parametrize("model", quick_first(MODELS, ["classes"]))
def test_packed_rows_give_what_padded_rows_do(model):
    params, run = ran(model)
    whole, alone = run(params, **packed()), run(params, **padded())
    at = [(row, number, one) for row, held in enumerate(ROWS) for number, one in enumerate(held)]
    if model == "classes":
        got, want = [whole[row, number] for row, number, _ in at], [alone[one, 0] for *_, one in at]
    else:
        segments = packed()["segments"]
        got = [whole[row][segments[row] == number] for row, number, _ in at]
        want = [alone[one, : LENGTHS[one]] for *_, one in at]
    assert_trees_close(got, want, tolerance=2e-5)


@pytest.mark.parametrize("model", MODELS)
def test_work_follows_real_tokens(model):
    """All matmuls of a packed batch are those of its tokens: half as many here."""
    params, run = ran(model)
    count = {
        name: traced_flops(run.trace(params, **rows).jaxpr).flops
        for name, rows in (("packed", packed()), ("padded", padded()))
    }
    real = sum(LENGTHS) / (len(LENGTHS) * WIDTH)
    assert real == 0.5
    assert count["packed"] == count["padded"] * real


@pytest.mark.parametrize("model", ["bert", "classes of tokens"])
def test_flops_that_are_told_are_those_of_the_matmuls(model):
    """Forward a third of a step's; every token sees all of its row."""
    config = BERTConfig(**SIZES, head=None if model == "bert" else HeadConfig(outputs=5))
    spec = describe(maker(config))
    tokens = jnp.zeros((2, WIDTH), jnp.int32)
    params = pure(maker(config)(nnx.Rngs(0)))
    found = traced_flops(jax.jit(lambda p: spec.merge(p)(tokens)).trace(params).jaxpr).flops
    assert 3 * found == config.decoder().train_flops_per_token(WIDTH) * tokens.size


@pytest.mark.catches("encoder-flops-halved")
@pytest.mark.parametrize("window", [1, 8, 31, 40, 200])
def test_keys_that_are_counted_are_those_a_window_shows(window):
    """Of layers with a window, half of it on each side, and of those without."""
    config = ModernBERTConfig(**SIZES, window=window, full_every=2).decoder()
    shown = [
        np.asarray(dense(Mask(causal=False, window=sides), WIDTH, WIDTH)).sum()
        for sides in (None, config.sides, None)
    ]
    keys = 6 * config.heads * 2 * config.head_dim * sum(shown) / WIDTH
    assert config.train_flops_per_token(WIDTH) == int(config.flops_per_token + keys)


def test_attention_has_no_pairs_of_padding_or_of_two_documents():
    """Pairs that kernels visit, as ranges or blocks, are those of the documents alone."""
    segments = packed()["segments"]
    mask = Mask(ascending=True, q_segments=segments, kv_segments=segments)
    pairs = np.asarray(dense(mask, WIDTH, WIDTH)).sum()
    assert pairs == sum(length**2 for length in LENGTHS)
