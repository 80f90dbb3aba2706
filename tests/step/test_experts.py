"""Decoders with experts train on any mesh as on one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from colossax.config import (
    BatchConfig,
    ExpertsConfig,
    OffloadConfig,
    PipelineConfig,
    Plan,
    Segment,
    preset,
)
from colossax.nn import (
    Decoder,
    DecoderConfig,
    LatentConfig,
    MixtureConfig,
    QueryGrowth,
    RopeConfig,
    every,
)
from colossax.optim import adamw, sgd
from colossax.planner import boost
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close

ROWS, LENGTH, VOCAB = 8, 32, 64
MIXTURE = {"experts": 8, "choices": 2, "mlp": 32, "balance_loss": 0.01, "z_loss": 1e-3}

MODELS = {
    "sparse": {},
    "dense first": {"first_dense": 1, "shared": 16, "shared_gated": True},
    "every second": {"every": 2, "score": "sigmoid", "bias_rate": 0.01, "groups": 4}
    | {"kept_groups": 2, "group_score": "top2", "scale": 2.5},
    "global": {"balance": "global", "router": "cosine", "router_dim": 8},
    "dropping": {"gate": "gshard", "capacity_factor": 0.6},
    "drawn": {"capacity_factor": 0.6, "priority": "random"},
    "noisy": {"gate": "dense_to_sparse", "choices": 3},
    "sinks": {"router_bias": True, "expert_bias": True},
    "chunks": {"choices": 1, "score": "sigmoid", "renormalise": False, "on_input": True}
    | {"shared": 16, "every": 2},
    "normed": {"renormalise": False},
    "pyramid": {"pyramid": ((2, 16),), "shared": 16, "shared_mix": "softmax"},
    "latent": {"shared": 16, "score": "sigmoid", "bias_rate": 0.01},
    "latent, whole queries": {"first_dense": 1, "shared": 16, "renormalise": False},
}

# Fields of the decoder about them.
AROUND = {
    "sinks": {
        "sinks": True,
        "qkv_bias": True,
        "out_bias": True,
        "window": 6,
        "full_layers": every(2, 4),
    }
    | {"activation": "clamped_swiglu"},
    "chunks": {"chunk": 6, "full_layers": every(4, 4), "full_rope": False, "qk_unit": True}
    | {"query_growth": QueryGrowth(step=4), "rope": RopeConfig(interleaved=True)},
    "normed": {"qk_norm_whole": True},
}


LATENT = {"kv_heads": 4, "head_dim": 12}
LATENTS = {
    "latent": {
        **LATENT,
        "latent": LatentConfig(kv_rank=16, q_rank=16, nope_dim=8, rope_dim=4, v_dim=10),
    },
    "latent, whole queries": {
        **LATENT,
        "latent": LatentConfig(kv_rank=16, nope_dim=8, rope_dim=4, v_dim=10),
    },
}
"""Models that have latent attention, with its sizes."""


def config(model):
    sizes = {"kv_heads": 2, "head_dim": 8} | LATENTS.get(model, {})
    return DecoderConfig(
        vocab=VOCAB,
        embed=32,
        layers=4,
        heads=4,
        mlp=64,
        max_seq=64,
        init_std=0.2,
        mixture=MixtureConfig(**{**MIXTURE, **MODELS[model]}),
        **{"rope": RopeConfig(), **sizes, **AROUND.get(model, {})},
    )


def batch():
    """Rows whose ends are padding."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    real = np.arange(LENGTH) < LENGTH - np.arange(ROWS)[:, None] % 3
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": real.astype(np.float32),
        "segments": np.where(real, 0, -1).astype(np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)).copy(),
    }


def run(plan, model, devices=None):
    """What three steps report, and what no optimizer moves."""
    made = config(model)
    state, step = boost(
        lambda rngs: Decoder(made, rngs=rngs),
        adamw(3e-3),
        next_token_loss(),
        plan,
        devices=jax.devices()[:devices],
    )
    found = []
    for _ in range(3):
        state, metrics = step(state, batch())
        found.append({name: np.asarray(value) for name, value in metrics.items()})
    moved = [
        np.atleast_2d(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state["params"])[0]
        if path[-1].key in ("bias", "shares")
    ]
    return found, np.concatenate(moved) if moved else np.zeros(0)


@functools.cache
def truth(model):
    return run(Plan(mesh={"data": 1}), model, 1)


FORM = {"dispatch_passes"}
"""What differs with the mesh."""


AGAIN = ("loss", "cross_entropy", "expert_load", "dropped_choices", "tokens")
"""What is compared of later steps, whose norms and entropies have the rounding of Adam's first."""


def assert_trains_as_one_device(plan, model="sparse"):
    found, moved = run(plan, model)
    wanted, wanted_moved = truth(model)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.keys() == other.keys()
        for name in AGAIN if number else one.keys() - FORM:
            assert_losses_close(one[name], other[name])
    np.testing.assert_allclose(moved, wanted_moved, atol=1e-6)


def mesh(**sizes):
    return Plan(mesh=sizes)


FULL = (Segment(remat="full"),)
PLANS = {
    "expert 8": mesh(expert=8),
    "expert 2, tensor 2, fsdp 2": mesh(expert=2, tensor=2, fsdp=2),
    "sequence over tensor": preset("zero3+megatron_sp", mesh={"expert": 2, "tensor": 4}),
    "ring": mesh(expert=2, ring=2, tensor=2),
    "ulysses": mesh(expert=4, ulysses=2),
    "folded ring, ulysses, tensor": mesh(ring=2, ulysses=2, tensor=2),
    "fsdp, tensor": mesh(fsdp=4, tensor=2),
    "data": mesh(data=8),
    "ddp": preset("ddp", mesh={"data": 2, "expert": 4}),
    "zero2": preset("zero2", mesh={"fsdp": 2, "expert": 4}),
    "accumulation": mesh(expert=4, tensor=2).replace(batch=BatchConfig(accumulation=2)),
    "remat": mesh(expert=4, fsdp=2).replace(segments=FULL),
    "gather": mesh(expert=8).replace(experts=ExpertsConfig(dispatch="gather")),
    "weights": mesh(expert=4, tensor=2).replace(experts=ExpertsConfig(dispatch="weights")),
    "one axis of two": mesh(expert=4, tensor=2).replace(experts=ExpertsConfig(group="expert")),
    "host memory": mesh(expert=4, fsdp=2).replace(
        offload=OffloadConfig(parameters=1.0, optimizer=1.0)
    ),
    "experts in host memory": mesh(expert=4, fsdp=2).replace(offload=OffloadConfig(experts=1.0)),
    "some experts in host memory": mesh(expert=2, tensor=2, fsdp=2).replace(
        offload=OffloadConfig(experts=0.5, optimizer=0.25)
    ),
    "stages": mesh(stage=2, expert=4),
    "stages, tensor": mesh(stage=2, expert=2, tensor=2),
    "stages, remat, fsdp": mesh(stage=2, expert=2, fsdp=2).replace(segments=FULL),
    "filled up": mesh(stage=2, expert=2, fsdp=2).replace(pipeline=PipelineConfig(microbatches=3)),
    "zero bubble": mesh(stage=2, expert=4).replace(pipeline=PipelineConfig(schedule="zb_h1")),
    "chunks": mesh(stage=2, expert=2, fsdp=2).replace(pipeline=PipelineConfig(chunks=2)),
    "cut stages": mesh(stage=2, expert=4).replace(pipeline=PipelineConfig(cuts=(1, 3))),
}

CASES = [
    *((name, "sparse") for name in PLANS),
    *((name, model) for model in MODELS for name in ("expert 2, tensor 2, fsdp 2", "ring")),
    *(
        (name, model)
        for model in AROUND
        for name in ("data", "ulysses", "folded ring, ulysses, tensor", "fsdp, tensor")
    ),
    ("accumulation", "every second"),
    ("remat", "every second"),
    ("stages", "normed"),
    ("cut stages", "sinks"),
    ("cut stages", "chunks"),
    ("cut stages", "dense first"),
    ("cut stages", "every second"),
    ("stages", "global"),
    *(
        (name, model)
        for model in ("drawn", "dropping", "noisy")
        for name in ("accumulation", "remat", "host memory", "stages")
    ),
    *((name, "latent") for name in PLANS),
    *((name, "pyramid") for name in ("accumulation", "host memory", "cut stages")),
]
QUICK = [
    ("expert 2, tensor 2, fsdp 2", "sinks"),
    ("expert 2, tensor 2, fsdp 2", "sparse"),
    ("accumulation", "every second"),
]


@pytest.mark.parametrize(("name", "model"), quick_first(dict.fromkeys(CASES), QUICK))
def test_every_plan_trains_as_one_device(name, model):
    assert_trains_as_one_device(PLANS[name], model)


def plainly_filled(plan, devices=None):
    """Balance loss and tokens of ten rows that say nothing of padding."""
    made = dataclasses.replace(config("sparse"), layers=2)
    made = dataclasses.replace(made, mixture=dataclasses.replace(made.mixture, balance_loss=1.0))
    state, step = boost(
        lambda rngs: Decoder(made, rngs=rngs),
        sgd(0.0),
        next_token_loss(),
        plan,
        devices=jax.devices()[:devices],
    )
    tokens = np.random.default_rng(0).integers(0, VOCAB, (10, LENGTH + 1)).astype(np.int32)
    given = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    metrics = step(state, {**given, "weights": np.ones((10, LENGTH), np.float32)})[1]
    return [float(metrics[name]) for name in ("loss", "balance_loss", "tokens")]


@pytest.mark.sweep
@pytest.mark.catches("fillers-are-no-padding")
def test_rows_that_fill_up_a_microbatch_reach_no_expert():
    plan = mesh(stage=2).replace(pipeline=PipelineConfig(microbatches=3))
    assert_losses_close(plainly_filled(plan, 2), plainly_filled(mesh(data=1), 1))


def alone(made, optimizer):
    """A decoder on one device: its state and step."""
    make, one = functools.partial(Decoder, made), jax.devices()[:1]
    return boost(
        lambda rngs: make(rngs=rngs), optimizer, next_token_loss(), mesh(data=1), devices=one
    )


@pytest.mark.catches("experts-counted-twice")
def test_a_bias_moves_by_its_rate_against_the_load():
    found, moved = truth("every second")
    loads = np.stack([one["expert_load"][1::2] for one in found])
    signs = np.sign(loads.mean(axis=-1, keepdims=True) - loads)
    np.testing.assert_allclose(moved, 0.01 * signs.sum(axis=0), atol=1e-6)


@pytest.mark.sweep
@pytest.mark.catches("gates-without-keys")
def test_a_random_capacity_is_drawn_anew_in_each_step():
    """Tokens are dropped that would not be by their places, and others in the next step."""
    made = dataclasses.replace(config("drawn"), layers=1)
    state, step = alone(made, sgd(0.0))
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
        assert metrics["dropped_choices"].sum() > 0
    assert len(set(losses)) == 3


def test_padding_is_no_load():
    found, _ = truth("sparse")
    real = batch()["weights"].sum()
    np.testing.assert_allclose(found[0]["expert_load"].sum(axis=-1), MIXTURE["choices"], rtol=1e-6)
    assert found[0]["tokens"] == real


def test_evenly_spread_experts_are_balanced_at_one():
    even = dataclasses.replace(config("sparse"), init_std=1e-6)
    state, step = alone(even, adamw(3e-3))
    _, metrics = step(state, batch())
    assert metrics["balance_loss"] == pytest.approx(4.0, rel=1e-3)  # of four layers


@pytest.mark.sweep
@pytest.mark.catches("loads-by-target")
def test_tokens_that_are_no_targets_count_among_those_that_experts_get():
    mixture = MixtureConfig(**MIXTURE, capacity_factor=0.6)
    made = dataclasses.replace(config("sparse"), layers=1, mixture=mixture)
    state, step = alone(made, sgd(0.0))
    given = batch()
    state, whole = step(state, given)
    _, masked = step(state, {**given, "weights": given["weights"] * (np.arange(LENGTH) > 24)})
    for name in ("expert_load", "router_entropy"):
        np.testing.assert_allclose(masked[name], whole[name], rtol=1e-5)
    counts = [float(one["dropped_choices"].sum() * one["tokens"]) for one in (masked, whole)]
    assert counts[0] == pytest.approx(counts[1], rel=1e-5) and counts[0] > 0
