"""Dropout drops the same values on every mesh, in every microbatch and whatever is recomputed."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from colossax import boost
from colossax.config import AttentionConfig, BatchConfig, PipelineConfig, Segment
from colossax.models import BERTConfig, T5Config, maker
from colossax.nn import (
    Decoder,
    DecoderConfig,
    DropoutConfig,
    HeadConfig,
    LatentConfig,
    MixtureConfig,
    RopeConfig,
)
from colossax.optim import adamw
from colossax.tasks import classification_loss, masked_token_loss, next_token_loss
from colossax.tasks.next_token import mean_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step.test_decoder_parts import PLANS as OF_PARTS
from tests.step.test_decoder_parts import batch as packed
from tests.step.test_decoder_parts import mesh
from tests.step.test_encoder_decoders import batch as pairs
from tests.step.test_images import SQUARE

DROPOUT = DropoutConfig(embedding=0.1, residual=0.2, attention=0.3)
SIZES = {"vocab": 64, "embed": 32, "layers": 4, "heads": 4, "mlp": 64, "max_seq": 64}
SIZES |= {"init_std": 0.2}
ROPE = {"kv_heads": 2, "head_dim": 8, "rope": RopeConfig()}


def decoder(**fields):
    return DecoderConfig(**{**SIZES, **ROPE, **fields})


MODELS = {
    "decoder": decoder(),
    "kinds": decoder(window=6, full_layers=(1, 3), parallel=True, norms="both"),
    "latent": decoder(
        head_dim=12,
        kv_heads=4,
        latent=LatentConfig(kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8),
    ),
    "experts": decoder(mixture=MixtureConfig(experts=4, choices=2, mlp=32)),
    "bert": BERTConfig(**SIZES),
    "t5": T5Config(**SIZES, decoder_layers=2, head_dim=8, buckets=8, farthest=20),
    "vit": dataclasses.replace(SQUARE, head=HeadConfig(outputs=3, pool="mean")),
}
LOSSES = {"bert": masked_token_loss(), "vit": classification_loss()}


def made(model, dropout=DROPOUT):
    config = dataclasses.replace(MODELS[model], dropout=dropout)
    if isinstance(config, DecoderConfig):
        return lambda rngs: Decoder(config, rngs=rngs)
    return maker(config)


def batch(model):
    if model == "vit":
        draw = np.random.default_rng(0)
        pixels = draw.standard_normal((8, 6, 10, 2)).astype(np.float32)
        return {"pixels": pixels, "labels": draw.integers(-1, 3, 8).astype(np.int32)}
    return pairs() if model == "t5" else packed()


def built(plan, model, dropout=DROPOUT):
    devices = jax.devices()[: int(np.prod(list(plan.mesh.values())))]
    loss = LOSSES.get(model, next_token_loss())
    return boost(made(model, dropout), adamw(3e-3, eps=1e-3), loss, plan, devices=devices)


def run(plan, model, dropout=DROPOUT, steps=2):
    """Losses and gradient norms of some steps."""
    state, step = built(plan, model, dropout)
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch(model))
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.asarray(found)


@functools.cache
def truth(model):
    return run(mesh(data=1), model)


def scheme(name, **sizes):
    return mesh(**sizes).replace(attention=AttentionConfig(scheme=name))


PLANS = {
    "data": mesh(data=8),
    **OF_PARTS,
    "contiguous ring": scheme("ring", ring=4, data=2),
    "gathered": scheme("all_gather", ring=4, data=2),
    "ring of scores": scheme("self_attention", ring=4, data=2),
    "accumulation": mesh(data=2).replace(batch=BatchConfig(accumulation=4)),
    "reduced once": mesh(data=2, tensor=2).replace(
        batch=BatchConfig(accumulation=2, reduce_once=True)
    ),
    "recomputed": mesh(data=1).replace(segments=(Segment(remat="full"),)),
    "unrolled": mesh(data=1).replace(segments=(*(Segment(count=1),) * 3, Segment())),
}
OF_TWO_STACKS = "stages of two stacks"
PLANS_OF_PAIRS = {
    OF_TWO_STACKS: mesh(stage=2, fsdp=2, tensor=2).replace(pipeline=PipelineConfig(cuts=(3, 3)))
}
IMPOSSIBLE = [
    *((name, "kinds") for name in ("stages", "host memory")),
    *((name, "t5") for name in ("stages", "unrolled")),
]
"""Refused with dropout or without, or another plan than it seems to be of two stacks."""

FEW = ("data, ring, tensor", "ulysses", "stages", "accumulation, remat", "host memory", "unrolled")
CASES = [
    (name, model)
    for model in MODELS
    for name in (PLANS if model == "decoder" else FEW)
    if (name, model) not in IMPOSSIBLE
] + [(OF_TWO_STACKS, "t5")]
QUICK = [("data, ring, tensor", "decoder"), ("accumulation", "decoder"), ("ulysses", "vit")]
MARKS = {
    QUICK[0]: pytest.mark.catches("dropout-of-local-tokens"),
    QUICK[1]: pytest.mark.catches("dropout-by-microbatch"),
}
OF_IMAGES = {"vit": pytest.mark.catches("dropout-not-of-images")}


@pytest.mark.parametrize(("name", "model"), quick_first(CASES, QUICK, MARKS))
def test_every_plan_drops_the_same(name, model):
    assert_losses_close(run({**PLANS, **PLANS_OF_PAIRS}[name], model), truth(model))


@pytest.mark.parametrize("model", quick_first(MODELS, ["vit"], OF_IMAGES))
def test_each_family_drops(model):
    assert np.all(np.abs(truth(model) / run(mesh(data=1), model, DropoutConfig()) - 1) > 1e-3)


def gradients(plan):
    """Of parameters, as one step of plain descent shows them."""
    devices = jax.devices()[: int(np.prod(list(plan.mesh.values())))]
    state, step = boost(made("decoder"), optax.sgd(1.0), next_token_loss(), plan, devices=devices)
    before = jax.device_get(state["params"])
    after = jax.device_get(step(state, batch("decoder"))[0]["params"])
    return jax.tree.map(np.subtract, before, after)


@pytest.mark.parametrize(
    "name", quick_first(["recomputed", "ring, ulysses", "2d"], ["ring, ulysses"])
)
def test_each_gradient_is_that_of_one_device(name):
    assert_trees_close(gradients(PLANS[name]), gradients(mesh(data=1)), tolerance=1e-4)


@pytest.mark.catches("dropout-in-evaluation")
def test_evaluation_drops_nothing():
    """The loss of the same parameters is that of a model without, on any mesh."""
    state, step = built(mesh(data=2), "decoder")
    plain, plain_step = built(mesh(data=1), "decoder", DropoutConfig())
    given = packed()
    found = mean_loss(step.evaluate, state, [given])
    assert_losses_close(found, mean_loss(plain_step.evaluate, plain, [given]))
    assert abs(float(step(state, given)[1]["loss"]) - found) > 1e-3, "and a step does"


@pytest.mark.catches("dropout-alike-in-all-steps")
def test_each_step_drops_anew_and_a_restored_state_goes_on(tmp_path):
    losses, steps = {}, 3
    state, step = boost(
        made("decoder"), optax.sgd(0.0), next_token_loss(), mesh(data=1), devices=jax.devices()[:1]
    )
    for number in range(steps):
        if number == 1:
            step.save(tmp_path, state)
        state, metrics = step(state, packed())
        losses[number] = float(metrics["loss"])
    assert len(set(losses.values())) == steps, "parameters stood still"
    devices = jax.devices()[:4]
    _, again = boost(
        made("decoder"), optax.sgd(0.0), next_token_loss(), mesh(ring=2, data=2), devices=devices
    )
    state = again.restore(tmp_path)
    for number in range(1, steps):
        state, metrics = again(state, packed())
        assert_losses_close(float(metrics["loss"]), losses[number])


def temporaries(plan, dropout):
    state, step = built(plan, "decoder", dropout)
    compiled = step.lower(state, batch("decoder")).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scanned", "recomputed", "unrolled"])
def test_no_mask_is_kept_for_backward(name):
    """Of four layers and eight sublayers, not even the values of one are alive for it."""
    plan = PLANS.get(name, mesh(data=1))
    values = 8 * 32 * 32 * 4
    dropout = DropoutConfig(embedding=0.1, residual=0.2)
    assert temporaries(plan, dropout) - temporaries(plan, DropoutConfig()) <= 1.1 * values
