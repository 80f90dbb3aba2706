"""Frozen bases in codes: the codes, what they stand for, and that any mesh trains beside them."""

import functools
import math
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import BatchConfig, OffloadConfig, Plan, Segment
from colossax.errors import InputError
from colossax.models import LlamaConfig, MixtralConfig, maker
from colossax.nn import AdapterConfig, describe, with_adapter
from colossax.nn.quantised.codes import BLOCK, LEVELS, Packing, dequantise, quantised
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close

CONFIG = LlamaConfig(vocab=64, embed=128, layers=2, heads=4, kv_heads=2, mlp=128, max_seq=16)
WIDE = LlamaConfig(vocab=64, embed=256, layers=2, heads=4, kv_heads=4, mlp=256, max_seq=16)
NF4 = AdapterConfig(rank=4, base="nf4")
DOUBLE = AdapterConfig(rank=4, base="nf4", double=True)
INT8 = AdapterConfig(rank=4, base="int8")
PLANS = {
    "fsdp and tensor": Plan(mesh={"fsdp": 2, "tensor": 2}, segments=(Segment(remat="full"),)),
    "stage": Plan(mesh={"stage": 2}, batch=BatchConfig(accumulation=2)),
    "2d": Plan(mesh={"row": 2, "col": 2}, tensor_layout="2d"),
    "host memory": Plan(mesh={"fsdp": 2}, offload=OffloadConfig(parameters=1.0, optimizer=1.0)),
}


def packing(form="nf4", double=False, shape=(128, 4, 64)):
    dims = ("embed", "heads", "head_dim")
    return Packing(form=form, double=double, shape=shape, dims=dims, contract=1)


def matrix(shape=(128, 4, 64), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def parts_of(one, w):
    return {name: np.asarray(x) for name, x in quantised(one, jnp.asarray(w)).items()}


@pytest.mark.catches("nf4-levels")
def test_levels_are_quantiles_of_the_normal_distribution():
    """Eight steps above 0 and seven below; the outermost leave half the mean tail of both."""
    offset, normal = 1 - (1 / 32 + 1 / 30) / 2, NormalDist()
    above, below = (
        [normal.inv_cdf(p) for p in np.linspace(offset, 0.5, count)[:-1]] for count in (9, 8)
    )
    wanted = np.array(sorted([0.0, *above, *(-x for x in below)])) / above[0]
    np.testing.assert_allclose(LEVELS, wanted, rtol=0, atol=1e-6)


def nf4_by_hand(w):
    """One number after another."""
    flat = w.reshape(w.shape[0], -1)
    codes = np.zeros((len(flat) // 2, flat.shape[1]), np.uint8)
    scales = np.zeros((len(flat) // BLOCK, flat.shape[1]), np.float32)
    for column in range(flat.shape[1]):
        for block in range(len(scales)):
            rows = flat[block * BLOCK : (block + 1) * BLOCK, column]
            scales[block, column] = largest = max(abs(x) for x in rows)
            for i, x in enumerate(rows):
                share = np.float32(x / largest) if largest else np.float32(0)
                far = [abs(float(share) - float(level)) for level in LEVELS]
                at = block * BLOCK + i
                codes[at // 2, column] |= far.index(min(far)) << (0 if at % 2 else 4)
    return codes, scales


@pytest.mark.catches("nf4-neighbours")
@pytest.mark.catches("nf4-ties")
def test_codes_of_four_bits_are_those_made_one_by_one():
    w = matrix((128, 3, 5))
    w[:64, 0, 0] = 0
    w[0, 1, 0] = 4.0  # a largest one, and beside it what is as near to 0 as to the next level
    w[1:64, 1, 0] = 4 * LEVELS[8] / 2
    parts = parts_of(packing(shape=w.shape), w)
    codes, scales = nf4_by_hand(w)
    np.testing.assert_array_equal(parts["codes"].reshape(codes.shape), codes)
    np.testing.assert_array_equal(parts["scales"].reshape(scales.shape), scales)
    assert parts["codes"][0, 1, 0] == 15 << 4 | 7 and not np.any(scales[0, 0])


def test_codes_of_eight_bits_are_those_of_numpy():
    w = matrix()
    w[:, 0, 0] = 0
    w[:3, 0, 1] = 127.0, 2.5, 3.5  # halves go to even
    w[3:, 0, 1] = 0
    parts = parts_of(packing("int8"), w)
    scales = np.abs(w).max(0) * np.float32(1 / 127)
    codes = np.round(w / np.where(scales > 0, scales, 1))
    np.testing.assert_array_equal(parts["scales"], scales)
    assert np.abs(parts["codes"] - codes).max() <= 1
    assert np.mean(parts["codes"] != codes) < 1e-4


@pytest.mark.catches("scales-in-codes")
def test_scales_in_eight_bits_are_those_of_numpy():
    w = matrix()
    scales = parts_of(packing(), w)["scales"]
    parts = parts_of(packing(double=True), w)
    assert parts["mean"] == pytest.approx(scales.mean(), rel=2**-8)
    blocks = (scales - parts["mean"]).reshape(2, 1, 256)
    steps = np.abs(blocks).max(2) * np.float32(1 / 127)
    np.testing.assert_array_equal(parts["steps"], steps)
    codes = np.round(blocks / steps[..., None])
    assert np.abs(parts["scales"].reshape(codes.shape) - codes).max() <= 1
    back = parts["scales"].reshape(codes.shape) * steps[..., None] + parts["mean"]
    assert np.abs(back.ravel() - scales.ravel()).max() <= 0.51 * steps.max()


@pytest.mark.parametrize("double", [False, True])
def test_four_bits_are_near_what_they_stand_for(double):
    w, one = matrix(), packing(double=double)
    back = np.asarray(dequantise(one, quantised(one, jnp.asarray(w)), jnp.dtype("float32")))
    widest = np.diff(LEVELS).max() / 2 + (0.01 if double else 1e-6)
    largest = np.repeat(np.abs(w.reshape(2, BLOCK, 4, 64)).max(1), BLOCK, axis=0)
    assert np.all(np.abs(back - w) <= widest * largest)
    assert np.sqrt(np.mean((back - w) ** 2)) < 0.11 * np.std(w)


def test_eight_bits_are_near_what_they_stand_for():
    w, one = matrix(), packing("int8")
    back = np.asarray(dequantise(one, quantised(one, jnp.asarray(w)), jnp.dtype("float32")))
    assert np.all(np.abs(back - w) <= np.abs(w).max(0) / 127 * 0.5001)


def batch(rows=4, seq=8):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (rows, seq + 1)).astype(np.int32)
    weights = np.ones((rows, seq), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def step_of(plan, adapter, config=CONFIG):
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    make = with_adapter(maker(config), adapter)
    rate = 0.02 if config is CONFIG else 0.005  # more overshoots on the wider one
    return build_step(make, adamw(rate), next_token_loss(), plan, devices=devices)


def trained(plan, adapter, steps=3, config=CONFIG):
    step = step_of(plan, adapter, config)
    state, losses = step.init(), []
    for _ in range(steps):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    return step, state, losses


@functools.cache
def on_one_device(adapter):
    return trained(Plan(mesh={"fsdp": 1}), adapter)[2]


@pytest.mark.parametrize("plan", quick_first(PLANS, ["fsdp and tensor"]))
def test_any_mesh_trains_beside_codes_as_one_device(plan):
    losses = on_one_device(NF4)
    assert losses[-1] < losses[0]
    assert_losses_close(trained(PLANS[plan], NF4)[2], losses)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("adapter", "config"), [(INT8, CONFIG), (DOUBLE, WIDE)], ids=["int8", "double"]
)
def test_any_mesh_trains_beside_other_codes_as_one_device(adapter, config):
    plans = Plan(mesh={"fsdp": 1}), PLANS["fsdp and tensor"]
    one, four = (trained(plan, adapter, config=config)[2] for plan in plans)
    assert one[-1] < one[0]
    assert_losses_close(four, one)


def test_gradients_are_those_of_the_matrix_that_codes_stand_for():
    """A model with the same numbers in float32 is the truth."""
    step, plain = (step_of(Plan(mesh={"fsdp": 1}), one) for one in (NF4, AdapterConfig(rank=4)))
    state, other = step.init(), plain.init()
    layers = {
        info.path: (info, x)
        for info, x in zip(
            jax.tree.leaves(step.spec.infos), jax.tree.leaves(state["params"]), strict=True
        )
    }

    def value(info, x):
        if (found := layers.get(info.path)) is not None:
            return found[1]
        of = layers[f"{info.path}/codes"][0].quantised.of
        parts = {name: layers[f"{info.path}/{name}"][1] for name in ("codes", "scales")}
        return jax.vmap(lambda one: dequantise(of, one, x.dtype))(parts)

    params = jax.tree.map(value, plain.spec.infos, other["params"])
    # B is 0 at first, and A has no gradient then.
    params, mine = (
        jax.tree.map(lambda i, x: x + 0.01 if i.path.endswith("/up") else x, one.spec.infos, tree)
        for one, tree in ((plain, params), (step, state["params"]))
    )
    rows = jax.tree.map(jnp.asarray, batch())
    found = step.gradients({**state, "params": mine}, rows)
    wanted = plain.gradients({**other, "params": params}, rows)
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (found.grads, wanted.grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.catches("base-not-quantised")
def test_bytes_at_rest_are_counted_and_nothing_else_learns():
    step, state, _ = trained(Plan(mesh={"fsdp": 1}), NF4, steps=2)
    matrices = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 128)
    infos, params = (jax.tree.leaves(tree) for tree in (step.spec.infos, state["params"]))
    kept = sum(x.nbytes for i, x in zip(infos, params, strict=True) if i.quantised is not None)
    assert kept == matrices // 2 + 4 * matrices // 64
    assert {i.path.rpartition("/")[2] for i in jax.tree.leaves(step.infos)} == {"down", "up"}
    whole = describe(with_adapter(maker(CONFIG), AdapterConfig(rank=4))).parameter_count()
    assert step.spec.parameter_count() == whole
    before = jax.tree.leaves(step_of(Plan(mesh={"fsdp": 1}), NF4).init()["params"])
    for info, old, new in zip(infos, before, params, strict=True):
        assert np.array_equal(old, new) == info.of_base, info.path


@pytest.mark.catches("stack-dequantised")
def test_no_step_holds_a_stack_of_matrices():
    step = step_of(Plan(mesh={"fsdp": 1}), NF4)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch().items()}
    text = step.lower(step.abstract, step.abstract_batch(shapes)).compile().as_text()
    assert "u8[2,64," in text
    assert "f32[2,128,4,32]" not in text and "f32[2,128,128]" not in text


def test_devices_gather_codes():
    step = step_of(Plan(mesh={"fsdp": 2}), NF4)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch().items()}
    text = step.lower(step.abstract, step.abstract_batch(shapes)).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert any("u8[" in line for line in gathers)
    assert not any("f32[128,4,32]" in line or "f32[128,128]" in line for line in gathers)


@pytest.mark.catches("quantised-experts-in-silence")
@pytest.mark.catches("nf4-blocks-unchecked")
def test_what_cannot_be_kept_in_codes_is_refused():
    def built(config, **settings):
        describe(with_adapter(maker(config), AdapterConfig(**{"rank": 2, **settings})))

    narrow = LlamaConfig(vocab=64, embed=96, layers=2, heads=4, kv_heads=2, mlp=128, max_seq=16)
    with pytest.raises(InputError, match="blocks of 64 inputs, and 'attn/.' has 96; give .*int8"):
        built(narrow, base="nf4")
    built(narrow, base="int8")
    with pytest.raises(InputError, match="blocks of 256 outputs, and 'attn/.' has"):
        built(CONFIG, base="nf4", double=True)
    mixed = MixtralConfig(
        vocab=64, embed=128, layers=2, heads=4, kv_heads=2, mlp=64, experts=4, choices=2, max_seq=16
    )
    with pytest.raises(InputError, match="has experts, whose matrices are not kept in nf4; give"):
        built(mixed, base="nf4")
    with pytest.raises(InputError, match="adapter.base: nf4 is of what is frozen"):
        built(CONFIG, rank=0, base="nf4")
    with pytest.raises(InputError, match="found 'fp4'; give own, nf4 or int8"):
        AdapterConfig(rank=2, base="fp4")
    with pytest.raises(InputError, match="adapter.double: it is of the scales of nf4"):
        AdapterConfig(rank=2, base="int8", double=True)
