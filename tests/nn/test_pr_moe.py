"""Experts beside an MLP that is weighed against them, and layers of different numbers of them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.checkpoint import RecordReader
from colossax.config import Plan
from colossax.errors import InputError
from colossax.inference import Generator
from colossax.layerwise import LayerState
from colossax.nn import (
    Decoder,
    DecoderConfig,
    Experts,
    MixtureConfig,
    RopeConfig,
    Side,
    describe,
    initialise,
)
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.sharding import use
from colossax.tasks import next_token_loss

MIXTURE = MixtureConfig(
    experts=2,
    choices=2,
    mlp=8,
    shared=12,
    shared_mix="softmax",
    pyramid=((2, 4), (3, 8)),
    balance_loss=0.01,
)
CONFIG = DecoderConfig(
    vocab=32,
    embed=16,
    layers=5,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp=24,
    max_seq=32,
    rope=RopeConfig(),
    init_std=0.3,
    mixture=dataclasses.replace(MIXTURE, first_dense=1),
)


def made(config):
    return lambda rngs: Decoder(config, rngs=rngs)


def given(module, alone, x):
    """What all of a layer gives, its experts alone, and its MLP alone."""
    state = LayerState(index=0, row=0, scanned=None, carried=None)
    mixed = [one.mix(x, Side(), state)[0] for one in (module, alone)]
    return *mixed, module.shared(x)


@pytest.mark.catches("residual-unweighed")
def test_what_all_take_and_the_experts_are_weighed_by_a_softmax():
    module = Experts(16, MIXTURE, rngs=nnx.Rngs(0), std=0.5)
    x = jax.random.normal(jax.random.key(1), (2, 6, 16))
    plain = dataclasses.replace(MIXTURE, shared=0, shared_mix="sum")
    alone = Experts(16, plain, rngs=nnx.Rngs(0), std=0.5)
    for name in ("up", "gate", "down"):
        getattr(alone, name)[...] = getattr(module, name)[...]
    alone.router.w[...] = module.router.w[...]
    found, of_experts, beside = jax.jit(given)(module, alone, x)
    share = np.exp(np.asarray(x @ module.shared_mix.w[...]))
    share /= share.sum(axis=-1, keepdims=True)
    wanted = share[..., :1] * beside + share[..., 1:] * of_experts
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.catches("pyramid-of-one-height")
def test_layers_have_the_experts_that_the_pyramid_gives_them():
    mixture = CONFIG.mixture
    assert mixture.experts_of(5) == (0, 2, 4, 8, 8)
    kinds = ("dense", "sparse_2", "sparse_4", "sparse_8", "sparse_8")
    assert CONFIG.layer_kinds == mixture.kinds(5) == kinds
    infos = {info.path: info for info in jax.tree.leaves(describe(made(CONFIG)).infos)}
    for experts, layers in ((2, 1), (4, 1), (8, 2)):
        up = infos[f"layers/sparse_{experts}/mlp/up"]
        assert (up.shape[up.stacked :], up.total_layers) == ((experts, 16, 8), layers)
        router = infos[f"layers/sparse_{experts}/mlp/router/w"]
        assert router.shape[-1] == experts
    level = dataclasses.replace(CONFIG, mixture=dataclasses.replace(mixture, pyramid=()))
    assert set(level.layer_kinds) == {"dense", "sparse"}


def test_flops_are_those_of_the_matrices_that_a_token_meets():
    infos, found = jax.tree.leaves(describe(made(CONFIG)).infos), 0
    for info in infos:
        dims, size = info.dims[info.stacked :], math.prod(info.shape)
        if len(dims) < 2 or info.path.startswith("embed"):
            continue
        chosen = 2 / info.shape[info.dims.index("experts")] if "experts" in dims else 1
        found += size * chosen
    assert CONFIG.flops_per_token == 6 * found


def test_refusals():
    for changes, message in (
        ({"pyramid": ((0, 4),)}, "layers from 1 on and ascending"),
        ({"pyramid": ((3, 4), (2, 8))}, "layers from 1 on and ascending"),
        ({"pyramid": ((1, 4, 8),)}, "give pairs of a layer's number and its experts"),
        ({"pyramid": ((1, 1),)}, "2 experts of a token, and there are 1; give at most 1"),
        ({"groups": 2, "kept_groups": 1, "pyramid": ((1, 5),)}, "2 groups do not divide 5"),
        ({"shared": 0}, "weighs the shared MLP, and there is none"),
        ({"shared_gated": True}, "and shared_gated weighs it already"),
        ({"shared_mix": "mean"}, "shared_mix: unknown 'mean'"),
    ):
        with pytest.raises(InputError, match=message):
            dataclasses.replace(MIXTURE, **changes)


@pytest.mark.sweep
def test_generation_goes_on_as_the_model_says():
    bound = Plan(mesh={"fsdp": 1}).bind(jax.devices()[:1])
    with use(bound):
        spec = describe(made(CONFIG))
    params = initialise(spec, bound, jax.random.key(0))
    prompt = [3, 1, 4, 1, 5]
    found = Generator(spec, bound, params, slots=16).generate(prompt, max_tokens=8).tokens
    tokens = list(prompt)
    with use(bound):
        for _ in range(8):
            logits = spec.merge(params)(jnp.asarray([tokens]))
            tokens.append(int(logits[0, -1].argmax()))
    assert list(found) == tokens[len(prompt) :]


@pytest.mark.sweep
def test_records_are_by_kind_and_move_to_another_mesh(tmp_path):
    one, other = ({"data": 1}, 1), ({"expert": 2, "tensor": 2}, 4)
    steps = [
        build_step(
            made(CONFIG), adamw(1e-3), next_token_loss(), Plan(mesh=mesh), devices=jax.devices()[:n]
        )
        for mesh, n in (one, other)
    ]
    state = steps[0].init()
    steps[0].save(tmp_path, state)
    records = RecordReader(tmp_path).records()
    assert records["model/params/layers/sparse_8/mlp/up"][0] == (2, 8, 16, 8)
    assert records["model/params/layers/sparse_2/mlp/shared_mix/w"][0] == (1, 16, 2)
    moved = steps[1].restore(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, moved["params"], state["params"])
