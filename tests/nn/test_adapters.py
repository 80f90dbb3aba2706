"""Adapters beside frozen maps: what they compute, and that any mesh trains them alike."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import (
    BatchConfig,
    OffloadConfig,
    PipelineConfig,
    Plan,
    Precision,
    Segment,
)
from colossax.errors import InputError
from colossax.models import DeepSeekV3Config, LlamaConfig, maker
from colossax.nn import AdapterConfig, describe, pure, with_adapter
from colossax.nn.adapters.weight import Adapted, column_lengths
from colossax.nn.rngs import fresh_rngs
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.sharding import Dense
from colossax.tasks import next_token_loss
from tests.aot.executed import executed_flops
from tests.cases import quick_first
from tests.oracle import assert_losses_close

CONFIG = LlamaConfig(
    vocab=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48, max_seq=16, attention_bias=True
)
LORA = AdapterConfig(rank=4, targets="attn/*")
DORA = AdapterConfig(rank=4, targets="attn/*,mlp/down,head", rslora=True, dora=True)
MIXED = DeepSeekV3Config(
    vocab=64,
    embed=32,
    layers=4,
    heads=4,
    mlp=48,
    expert_mlp=16,
    experts=4,
    choices=2,
    shared=1,
    groups=1,
    kept_groups=1,
    first_dense=0,
    q_rank=None,
    kv_rank=8,
    nope_dim=4,
    rope_dim=4,
    v_dim=8,
    max_seq=16,
)
SHARED = AdapterConfig(rank=4, targets="attn/*,mlp/shared/*")
STAGES = {"batch": BatchConfig(accumulation=4)}
PLANS = {
    "data": Plan(mesh={"data": 4}),
    "fsdp": Plan(mesh={"fsdp": 4}, segments=(Segment(count=1), Segment(count=3))),
    "tensor": Plan(mesh={"tensor": 2, "fsdp": 2}),
    "ring": Plan(mesh={"ring": 2, "fsdp": 2}),
    "ulysses": Plan(mesh={"ulysses": 2}),
    "2d": Plan(mesh={"row": 2, "col": 2}, tensor_layout="2d"),
    "accumulation and remat": Plan(
        mesh={"fsdp": 2}, batch=BatchConfig(accumulation=2), segments=(Segment(remat="full"),)
    ),
    "host memory": Plan(mesh={"fsdp": 2}, offload=OffloadConfig(parameters=1.0, optimizer=1.0)),
    "stage": Plan(mesh={"stage": 2, "tensor": 2}, **STAGES),
    "stage, backward in two parts": Plan(
        mesh={"stage": 2}, pipeline=PipelineConfig(schedule="zb_h1"), **STAGES
    ),
    "stage, host memory": Plan(
        mesh={"stage": 2}, offload=OffloadConfig(parameters=1.0, optimizer=1.0), **STAGES
    ),
    "stage, reduced once": Plan(
        mesh={"stage": 2, "data": 2}, batch=BatchConfig(accumulation=2, reduce_once=True)
    ),
    "stage, programs of their own": Plan(
        mesh={"stage": 2},
        segments=(Segment(count=1), Segment(count=3)),
        pipeline=PipelineConfig(cuts=(1, 3)),
        **STAGES,
    ),
}

OF_LORA = ["fsdp", "2d", "host memory", "stage", "stage, programs of their own"]
"""What makes of it another program than of DoRA, which has all that it has."""

BESIDE_EXPERTS = {
    "experts": Plan(mesh={"expert": 2, "fsdp": 2}),
    "experts, host memory": Plan(
        mesh={"expert": 2}, offload=OffloadConfig(parameters=1.0, optimizer=1.0)
    ),
    "experts and stages": Plan(mesh={"stage": 2, "expert": 2}, **STAGES),
}


def batch(rows=8, seq=8):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (rows, seq + 1)).astype(np.int32)
    weights = np.ones((rows, seq), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def shapes():
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch().items()}


def step_of(plan, adapter, config=CONFIG):
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    make = with_adapter(maker(config), adapter)
    return build_step(make, adamw(0.02), next_token_loss(), plan, devices=devices)


def trained(plan, adapter, steps=3, config=CONFIG):
    step = step_of(plan, adapter, config)
    state, losses = step.init(), []
    for _ in range(steps):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    return step, state, losses


@functools.cache
def on_one_device(adapter, config=CONFIG):
    return trained(Plan(mesh={"fsdp": 1}), adapter, config=config)[2]


def compare(plan, adapter, config=CONFIG):
    losses = on_one_device(adapter, config)
    assert losses[-1] < losses[0]
    assert_losses_close(trained(plan, adapter, config=config)[2], losses)


@pytest.mark.parametrize("plan", quick_first(PLANS, ["tensor"]))
def test_any_mesh_trains_dora_as_one_device(plan):
    compare(PLANS[plan], DORA)


@pytest.mark.sweep
@pytest.mark.parametrize("plan", OF_LORA)
def test_any_mesh_trains_lora_as_one_device(plan):
    compare(PLANS[plan], LORA)


@pytest.mark.sweep
@pytest.mark.parametrize("plan", BESIDE_EXPERTS)
def test_any_mesh_trains_beside_experts_as_one_device(plan):
    compare(BESIDE_EXPERTS[plan], SHARED, MIXED)


@pytest.mark.sweep
def test_the_bias_of_a_router_stays_with_its_model():
    """It has a rule of its own, which moves it where the model learns."""
    step = step_of(BESIDE_EXPERTS["experts"], SHARED, MIXED)
    before = jax.tree.map(np.asarray, step.init()["params"])
    after = trained(BESIDE_EXPERTS["experts"], SHARED, 2, MIXED)[1]["params"]
    infos, rules = jax.tree.leaves(step.spec.infos), 0
    for info, old, new in zip(infos, *map(jax.tree.leaves, (before, after)), strict=True):
        assert np.array_equal(old, new) == info.of_base, info.path
        rules += info.update is not None
    assert rules


FLOAT8 = Precision(compute="bfloat16", matmul="float8")


@pytest.mark.catches("adapter-in-float8")
def test_a_narrow_pair_is_not_multiplied_in_float8():
    assert FLOAT8.in_float8(("embed", "mlp"))
    assert not FLOAT8.in_float8(("embed", "rank")) and not FLOAT8.in_float8(("rank", "mlp"))


@pytest.mark.sweep
def test_it_begins_as_its_base_does_in_float8():
    plan = Plan(mesh={"fsdp": 2}, precision=FLOAT8)
    step = step_of(plan, LORA)
    text = step.lower(step.abstract, step.abstract_batch(shapes())).as_text()
    assert "f8E4M3FN" in text
    assert_losses_close(trained(plan, LORA, 1)[2], trained(plan, AdapterConfig(), 1)[2])


@pytest.mark.catches("base-learns")
def test_what_is_frozen_has_no_gradient_no_state_and_stays():
    step = step_of(Plan(mesh={"fsdp": 2}), DORA)
    before = jax.tree.map(np.asarray, step.init()["params"])
    learning = {info.path for info in jax.tree.leaves(step.infos)}
    assert {path.rpartition("/")[2] for path in learning} == {"down", "up", "stretch"}
    state, _ = step(step.init(), batch())
    state, _ = step(state, batch())  # in the first one B is 0, and A does not move
    for info, old, new in zip(
        jax.tree.leaves(step.spec.infos),
        jax.tree.leaves(before),
        jax.tree.leaves(state["params"]),
        strict=True,
    ):
        assert np.array_equal(old, new) == info.of_base == (info.path not in learning), info.path
    count = sum(math.prod(i.shape) for i in jax.tree.leaves(step.infos))
    moments = [x for x in jax.tree.leaves(state["opt_state"]) if x.ndim]
    assert sum(x.size for x in moments) == 2 * count


@pytest.mark.catches("frozen-flops")
def test_what_is_frozen_costs_no_gradient_and_no_memory_of_one():
    """Counted in the compiled program: 2 FLOPs less for each frozen weight, 12 bytes less."""
    plain = dataclasses.replace(CONFIG, attention_bias=False)
    wide, tokens = plain.decoder(), batch()["tokens"]
    count = {}
    for adapter in (AdapterConfig(), LORA):
        step = step_of(Plan(mesh={"fsdp": 1}), adapter, plain)
        program = step.lower(step.abstract, step.abstract_batch(shapes())).compile()
        infos = jax.tree.leaves(step.spec.infos)
        frozen, learning = (
            sum(math.prod(i.shape) for i in infos if i.of_base == which) for which in (True, False)
        )
        count[bool(adapter)] = executed_flops(program.as_text()) / tokens.size
        held = program.memory_analysis().argument_size_in_bytes
        assert 0 < held - 4 * (frozen + 3 * learning) < 4096  # and a batch, a key, counts
    saved = sum(
        wide.train_flops_per_token(8, frozen=which) * (1 - 2 * which) for which in (False, True)
    )
    assert saved * 3 == wide.flops_per_token
    assert count[False] - count[True] == saved - 6 * learning


@pytest.mark.catches("adapter-begins-random")
@pytest.mark.parametrize("adapter", [LORA, DORA], ids=["lora", "dora"])
def test_a_model_begins_as_without_its_adapter_to_the_bit(adapter):
    def logits(make):
        model = make(fresh_rngs(3))
        hidden, _ = model.hidden(jnp.asarray(batch()["tokens"]))
        return hidden @ model.head_weight()

    np.testing.assert_array_equal(
        logits(with_adapter(maker(CONFIG), adapter)), logits(maker(CONFIG))
    )


def weight(*, stretch, seed=0):
    random = np.random.default_rng(seed)
    w, down, up, added = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((6, 3, 5), (6, 2), (2, 3, 5), (3, 5))
    )
    dims = ("embed", "heads", "head_dim")
    whole = w + 0.7 * np.tensordot(down, up, axes=1)
    if stretch:
        norms = [np.sqrt((x**2).sum(0)) for x in (w, whole)]
        whole = whole * (norms[0] + added) / norms[1]
    one = Adapted(
        Dense(jnp.asarray(w), dims),
        Dense(jnp.asarray(down), ("embed", "rank")),
        Dense(jnp.asarray(up), ("rank", *dims[1:])),
        Dense(jnp.asarray(added), dims[1:]) if stretch else None,
        0.7,
    )
    return one, whole


@pytest.mark.catches("dora-length-of-base")
@pytest.mark.parametrize("stretch", [False, True])
def test_it_multiplies_as_the_matrix_it_stands_for(stretch):
    one, whole = weight(stretch=stretch)
    x = np.random.default_rng(1).normal(size=(2, 4, 6)).astype(np.float32)
    bias = np.arange(15, dtype=np.float32).reshape(3, 5)
    (y,) = Adapted.multiply(jnp.asarray(x), [(one, jnp.asarray(bias))], contract=1)
    np.testing.assert_allclose(y, np.tensordot(x, whole, axes=1) + bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(one.gathered(), whole, rtol=1e-5, atol=1e-6)


def test_columns_are_as_long_with_a_pair_of_zeros_to_the_bit():
    w = jnp.asarray(np.random.default_rng(2).normal(size=(40, 7)), jnp.bfloat16)
    own, whole = column_lengths(w, jnp.ones((40, 3)), jnp.zeros((3, 7)), 2.0)
    np.testing.assert_array_equal(own, whole)
    np.testing.assert_allclose(own, np.linalg.norm(np.asarray(w, np.float32), axis=0), rtol=1e-6)


def test_base_parameters_are_those_of_the_model_without():
    plain = jax.tree.leaves(pure(maker(CONFIG)(fresh_rngs(0))))
    spec = describe(with_adapter(maker(CONFIG), LORA))
    params = jax.tree.leaves(pure(with_adapter(maker(CONFIG), LORA)(fresh_rngs(0))))
    infos = jax.tree.leaves(spec.infos)
    base = [x for info, x in zip(infos, params, strict=True) if info.of_base]
    assert len(base) == len(plain)
    found = sorted(float(x.sum()) for x in base)
    assert found == sorted(float(x.sum()) for x in plain)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"targets": "attn/z"}, "no map is called 'attn/z'.*give patterns of .*attn/q"),
        ({"targets": "mlp/*,gone/*"}, r"no map is called 'gone/\*'"),
        ({"rank": 17, "targets": "attn/k"}, "17 is above 16, the smaller side of 'attn/k'"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(adapter, message):
    with pytest.raises(InputError, match=message):
        describe(with_adapter(maker(CONFIG), AdapterConfig(**{"rank": 2, **adapter})))


@pytest.mark.catches("experts-left-out-in-silence")
@pytest.mark.parametrize("targets", ["mlp/*", "attn/*,mlp/up", "*"])
def test_experts_are_refused_by_name(targets):
    with pytest.raises(InputError, match=r"names the experts' matrices, such as 'mlp/.*shared/up"):
        describe(with_adapter(maker(MIXED), AdapterConfig(rank=2, targets=targets)))


def test_settings_out_of_bounds_are_refused():
    with pytest.raises(InputError, match="adapter.targets: it names no maps"):
        AdapterConfig(rank=2, targets=" , ")
    with pytest.raises(InputError, match="adapter.alpha"):
        AdapterConfig(rank=2, alpha=0.0)
    assert not AdapterConfig()
    assert AdapterConfig(rank=4, alpha=8.0).scale == 2
    assert AdapterConfig(rank=4, alpha=8.0, rslora=True).scale == 4
