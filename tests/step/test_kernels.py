"""A step of a tiny Llama by the kernels is that of XLA; interpreted, and on a GPU."""

import jax
import numpy as np
import optax
import pytest

from colossax.config import AttentionConfig, Plan, Precision
from colossax.models import LlamaConfig, maker
from colossax.pallas.attention import api
from colossax.pallas.attention.mosaic_gpu import interpreted
from colossax.planner import boost
from colossax.tasks import next_token_loss
from tests.pallas.places import GPU, no_races

SEQ, VOCAB = 70, 64
# Drawn wide: of logits near zero any softmax is the same.
LLAMA = LlamaConfig(
    vocab=VOCAB,
    embed=128,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=128,
    mlp=64,
    max_seq=SEQ,
    init_std=0.1,
)


def batch():
    """Three documents in a row and padding behind them, all of uneven lengths."""
    lengths = (30, 25, 7, SEQ - 62)
    segments = np.repeat([0, 1, 2, -1], lengths)[None].astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 1, SEQ)).astype(np.int32)
    return {
        "tokens": tokens[0],
        "targets": tokens[1],
        "segments": segments,
        "positions": positions.astype(np.int32),
        "weights": (segments >= 0).astype(np.float32),
    }


def loss_and_gradients(kernel):
    plan = Plan(
        mesh={"fsdp": 1},
        attention=AttentionConfig(kernel=kernel),
        precision=Precision(compute="bfloat16"),
    )
    state, step = boost(
        maker(LLAMA), optax.sgd(1.0), next_token_loss(), plan, devices=jax.devices()[:1]
    )
    found = jax.jit(step.gradients)(state, batch())
    return float(found.loss), found.grads


@pytest.mark.parametrize("place", [pytest.param("interpret", marks=pytest.mark.sweep), GPU])
def test_loss_and_gradients_are_those_of_xla(place, monkeypatch):
    expected_loss, expected = loss_and_gradients("xla")
    if place == "interpret":  # in the place of the device that the kernels are for
        monkeypatch.setitem(api.IMPLEMENTATIONS, "mosaic", interpreted)
        # Its callbacks depend on all parameters, and no weight could do without them.
        monkeypatch.setattr(
            "colossax.step.gradients.accumulate.inputs_used",
            lambda _, *args: (False,) * len(jax.tree.leaves(args)),
        )
    loss, found = loss_and_gradients("mosaic")
    assert no_races(place)
    # bfloat16 has 8 bits; both round the same activations, but for those of attention.
    assert abs(loss - expected_loss) < 1e-3 * expected_loss
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, wanted), one in zip(leaves, jax.tree.leaves(found), strict=True):
        error = np.linalg.norm(np.asarray(one - wanted)) / np.linalg.norm(np.asarray(wanted))
        assert error < 2e-2, (jax.tree_util.keystr(path), error)
