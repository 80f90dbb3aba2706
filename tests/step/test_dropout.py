"""Dropout drops the same values on every mesh, in every microbatch and whatever is recomputed."""

import functools

import jax
import numpy as np
import pytest

from colossax import Plan, boost, preset
from colossax.config import (
    AttentionConfig,
    BatchConfig,
    OffloadConfig,
    PipelineConfig,
    Segment,
)
from colossax.nn import Decoder, DecoderConfig, DropoutConfig, EncoderDecoder, RopeConfig
from colossax.nn.config import LatentConfig, MixtureConfig, RelativeConfig
from colossax.optim import adamw
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close

ROWS, LENGTH, SOURCE, VOCAB = 8, 32, 24, 64
DROPOUT = DropoutConfig(embedding=0.1, residual=0.2, attention=0.3)

MODELS = {
    "decoder": {"rope": RopeConfig()},
    "post-norm": {"norm": "layer", "norms": "sum", "final_norm": False, "learned_positions": 64},
    "kinds": {"rope": RopeConfig(), "window": 6, "full_layers": (1, 3), "parallel": True},
    "latent": {
        "rope": RopeConfig(),
        "head_dim": 12,
        "kv_heads": 4,
        "latent": LatentConfig(kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8),
    },
    "experts": {
        "rope": RopeConfig(),
        "mixture": MixtureConfig(experts=4, choices=2, mlp=32),
    },
}


def config(fields, dropout=DROPOUT, **others):
    sizes = {"vocab": VOCAB, "embed": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8}
    more = {"mlp": 64, "max_seq": 64, "init_std": 0.2, "dropout": dropout}
    return DecoderConfig(**{**sizes, **more, **fields, **others})


def maker(model, dropout=DROPOUT):
    if model != "pair":
        made = config(MODELS[model], dropout)
        return lambda rngs: Decoder(made, rngs=rngs)
    relative = {"relative": RelativeConfig(buckets=8, farthest=16), "layers": 2}
    encoder = config(relative, dropout, causal=False)
    decoder = config(relative, dropout, longest_source=SOURCE, start=0)
    return lambda rngs: EncoderDecoder(encoder, decoder, rngs=rngs)


def batch(model):
    """Rows of two documents whose ends are padding; or pairs."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    places = np.arange(LENGTH)
    ends = LENGTH - np.arange(ROWS)[:, None] % 3
    weights = (places < ends).astype(np.float32)
    text = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    if model == "pair":
        return {**text, "source": rng.integers(0, VOCAB, (ROWS, SOURCE)).astype(np.int32)}
    cut = 20 + np.arange(ROWS)[:, None] % 4
    second = places >= cut
    return {
        **text,
        "segments": np.where(places < ends, second, -1).astype(np.int32),
        "positions": np.where(second, places - cut, places).astype(np.int32),
    }


def run(plan, model, devices=None, dropout=DROPOUT, steps=2):
    """Losses, gradient norms and right guesses of some steps."""
    state, step = boost(
        maker(model, dropout),
        adamw(3e-3, eps=1e-3),
        next_token_loss(),
        plan,
        devices=jax.devices()[:devices],
    )
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch(model))
        found.append([float(metrics[name]) for name in ("loss", "grad_norm", "accuracy")])
    return np.asarray(found)


@functools.cache
def truth(model):
    return run(Plan(mesh={"data": 1}), model, 1)


def mesh(**sizes):
    return Plan(mesh=sizes)


def scheme(name, **sizes):
    return mesh(**sizes).replace(attention=AttentionConfig(scheme=name))


PLANS = {
    "data": mesh(data=8),
    "fsdp, tensor": mesh(fsdp=4, tensor=2),
    "data, ring, tensor": mesh(data=2, ring=2, tensor=2),
    "ulysses": mesh(fsdp=2, ulysses=2, tensor=2),
    "ring, ulysses": mesh(ring=4, ulysses=2),
    "contiguous ring": scheme("ring", ring=4, data=2),
    "gathered": scheme("all_gather", ring=4, data=2),
    "ring of scores": scheme("self_attention", ring=4, data=2),
    "sequence over tensor": preset("zero3+megatron_sp", mesh={"fsdp": 4, "tensor": 2}),
    "stages": mesh(stage=2, fsdp=2, tensor=2),
    "stages, ring": mesh(stage=2, ring=2, data=2),
    "cut stages": mesh(stage=2, fsdp=2, tensor=2).replace(pipeline=PipelineConfig(cuts=(1, 3))),
    "2d": mesh(data=2, row=2, col=2).replace(tensor_layout="2d"),
    "accumulation": mesh(data=2).replace(batch=BatchConfig(accumulation=4)),
    "reduced once": mesh(data=2, tensor=2).replace(
        batch=BatchConfig(accumulation=2, reduce_once=True)
    ),
    "recomputed": mesh(fsdp=4, tensor=2).replace(segments=(Segment(remat="full"),)),
    "unrolled": mesh(fsdp=2).replace(segments=(Segment(count=1), Segment(count=1), Segment())),
    "host memory": mesh(fsdp=4, tensor=2).replace(
        offload=OffloadConfig(parameters=1.0, optimizer=1.0)
    ),
}
QUICK = [
    ("data, ring, tensor", "decoder"),
]
CASES = [(name, model) for model in (*MODELS, "pair") for name in PLANS]


@pytest.mark.parametrize(("name", "model"), quick_first(CASES, QUICK))
def test_every_plan_drops_the_same(name, model):
    devices = int(np.prod(list(PLANS[name].mesh.values())))
    assert_losses_close(run(PLANS[name], model, devices), truth(model))
