"""Parts of dense decoders train on every mesh as on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax import Plan, boost, preset
from colossax.config import BatchConfig, OffloadConfig, PipelineConfig, Segment
from colossax.nn import (
    Decoder,
    DecoderConfig,
    DynamicScaling,
    LongScaling,
    RopeConfig,
    every,
)
from colossax.optim import adamw
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close

ROWS, LENGTH, VOCAB = 8, 32, 64
LAYER_NORM = {"norm": "layer", "gated": False, "activation": "gelu"}
LONG = LongScaling(short=(1.0, 1.1), long=(2.0, 3.0), original_max_positions=16, magnitude=1.1)

MODELS = {
    "sandwich": {
        "norms": "both",
        "norm_from_one": True,
        "qk_norm": True,
        "embed_scale": 5.5,
        "score_scale": 0.3,
        "score_cap": 3.0,
        "logit_cap": 4.0,
        "window": 6,
        "full_layers": every(2, 4),
        "local_rope": RopeConfig(theta=30.0),
        "tied": True,
    },
    "outputs": {"norms": "output", "qk_norm_whole": True},
    "side by side, one norm": {
        **LAYER_NORM,
        "parallel": True,
        "shared_norm": True,
        "norm_bias": False,
        "logit_scale": 0.5,
        "qk_norm_layer": True,
        "rope": RopeConfig(interleaved=True),
    },
    "side by side, two norms": {
        **LAYER_NORM,
        "parallel": True,
        "mlp_bias": True,
        "head_bias": True,
        "rope": RopeConfig(dims=4),
    },
    "sums": {
        **LAYER_NORM,
        "norms": "sum",
        "final_norm": False,
        "token_width": 16,
        "rope": None,
        "learned_positions": 64,
        "tied": True,
    },
    "alibi": {**LAYER_NORM, "rope": None, "alibi": True, "alibi_scale": 0.4, "parallel": True},
    "no rope": {"full_layers": every(2, 4), "full_rope": False},
    "dynamic": {"rope": RopeConfig(dynamic=DynamicScaling(factor=2.0, original_max_positions=16))},
    "long": {"rope": RopeConfig(long=LONG, dims=4)},
}


def config(model):
    return DecoderConfig(
        vocab=VOCAB,
        embed=32,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp=64,
        max_seq=64,
        init_std=0.2,
        **{"rope": RopeConfig(), **MODELS[model]},
    )


def batch():
    """Rows of two documents whose ends are padding."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    places = np.arange(LENGTH)
    ends = LENGTH - np.arange(ROWS)[:, None] % 3
    cut = 20 + np.arange(ROWS)[:, None] % 4
    second = places >= cut
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": (places < ends).astype(np.float32),
        "segments": np.where(places < ends, second, -1).astype(np.int32),
        "positions": np.where(second, places - cut, places).astype(np.int32),
    }


def run(plan, model, devices=None):
    """Losses, gradient norms and right guesses of three steps."""
    made = config(model)
    state, step = boost(
        lambda rngs: Decoder(made, rngs=rngs),
        adamw(3e-3, eps=1e-3),
        next_token_loss(),
        plan,
        devices=jax.devices()[:devices],
    )
    found = []
    for _ in range(3):
        state, metrics = step(state, batch())
        found.append([float(metrics[name]) for name in ("loss", "grad_norm", "accuracy")])
    return np.asarray(found)


@functools.cache
def truth(model):
    return run(Plan(mesh={"data": 1}), model, 1)


def mesh(**sizes):
    return Plan(mesh=sizes)


PLANS = {
    "fsdp, tensor": mesh(fsdp=4, tensor=2),
    "data, ring, tensor": mesh(data=2, ring=2, tensor=2),
    "ulysses": mesh(fsdp=2, ulysses=2, tensor=2),
    "ring, ulysses": mesh(ring=4, ulysses=2),
    "sequence over tensor": preset("zero3+megatron_sp", mesh={"fsdp": 4, "tensor": 2}),
    "stages": mesh(stage=2, fsdp=2, tensor=2),
    "stages, ring": mesh(stage=2, ring=2, data=2),
    "cut stages": mesh(stage=2, fsdp=2, tensor=2).replace(pipeline=PipelineConfig(cuts=(1, 3))),
    "2d": mesh(data=2, row=2, col=2).replace(tensor_layout="2d"),
    "accumulation, remat": mesh(fsdp=4, tensor=2).replace(
        batch=BatchConfig(accumulation=2), segments=(Segment(remat="full"),)
    ),
    "host memory": mesh(fsdp=4, tensor=2).replace(
        offload=OffloadConfig(parameters=1.0, optimizer=1.0)
    ),
}
ALIKE = ("stages", "stages, ring", "host memory")
"""Plans under which layers do not take turns."""

CASES = [
    (name, model)
    for model, fields in MODELS.items()
    for name in PLANS
    if not (name in ALIKE and "full_layers" in fields)
]
QUICK = [
    ("fsdp, tensor", "sandwich"),
    ("stages", "side by side, one norm"),
    ("data, ring, tensor", "sums"),
]


@pytest.mark.parametrize(("name", "model"), quick_first(CASES, QUICK))
def test_every_plan_trains_as_one_device(name, model):
    assert_losses_close(run(PLANS[name], model), truth(model))


@pytest.mark.catches("loss-of-bare-products")
@pytest.mark.parametrize("model", ["sandwich", "side by side, two norms"])
def test_the_loss_is_of_the_models_logits(model):
    """Bounds and biases of logits are in it."""
    made = Decoder(dataclasses.replace(config(model), layers=2, full_layers=()), rngs=nnx.Rngs(0))
    if made.head_bias is not None:
        made.head_bias[...] = jax.random.normal(jax.random.key(1), made.head_bias.shape)
    given = jax.tree.map(jnp.asarray, batch())
    terms, _ = next_token_loss()(made, given)
    total, weight, _ = terms["cross_entropy"]
    where = {name: given[name] for name in ("positions", "segments")}
    told = jax.nn.log_softmax(made(given["tokens"], **where))
    chosen = jnp.take_along_axis(told, given["targets"][..., None], axis=-1)[..., 0]
    want = -jnp.sum(chosen * given["weights"]) / jnp.sum(given["weights"])
    assert_losses_close(total / weight, want)
