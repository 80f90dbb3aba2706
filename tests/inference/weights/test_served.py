"""Matrices in eight bits: made while they are read, multiplied as codes, the same on any mesh."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from colossax.cli import main
from colossax.config import OffloadConfig, Plan
from colossax.errors import InputError
from colossax.models import LlamaConfig, MixtralConfig, maker
from colossax.models.adapters import quantising
from colossax.models.adapters.quantising import through_codes
from colossax.nn import AdapterConfig, describe
from colossax.nn.quantised.codes import Packing, quantised
from colossax.nn.quantised.scaled import ScaledWeight
from colossax.nn.quantised.serving import with_served
from colossax.scheduling import EngineRequest
from colossax.sharding import linear, use
from colossax.sharding.experts import LocalExperts
from tests.cases import quick_first
from tests.fresh import fresh_params
from tests.inference.weights.made import input_axes, logits, stood_for, stored, written
from tests.models.test_parity import TEXTS, expected

FORMS = ("int8", "fp8")
QUICK = [("llama", "fp8"), ("gpt_oss", "int8"), ("deepseek_v3", "int8")]
"""A head of its own, experts with biases, latent attention and experts beside what is for all."""

PLANS = {
    "fsdp 2, tensor 2": Plan(mesh={"fsdp": 2, "tensor": 2}),
    "expert 2, tensor 2": Plan(mesh={"expert": 2, "tensor": 2}),
    "expert 2, fsdp 2": Plan(mesh={"expert": 2, "fsdp": 2}),
    "host memory": Plan(mesh={"fsdp": 2}, offload=OffloadConfig(parameters=1.0)),
    "stage 2": Plan(mesh={"stage": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stored")


def loaded(folder, case, form, plan=None):
    """On as many devices as the plan asks for."""
    plan = plan or Plan()
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    return stored(folder, case).load(plan, devices, weights=form)


def matrix(form, shape=(96, 4, 24), seed=0):
    """Codes of a random one, and its packing."""
    w = np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 8
    w[:, 1] *= 30  # outputs of other sizes have other scales
    dims = ("embed", "heads", "head_dim")
    packing = Packing(form=form, double=False, shape=shape, dims=dims, contract=1)
    return ScaledWeight(quantised(packing, jnp.asarray(w)), packing), w


@pytest.mark.catches("fp8-largest")
def test_codes_of_fp8_are_those_of_numpy():
    weight, w = matrix("fp8")
    scales = np.abs(w).max(0) * np.float32(1 / 448)
    np.testing.assert_array_equal(weight.parts["scales"], scales)
    codes = np.clip(w / scales, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(weight.parts["codes"].astype(np.float32), codes.astype("f"))
    assert np.abs(codes.astype("f")).max(0).min() == 448


@pytest.mark.catches("sums-of-codes-overflow")
@pytest.mark.catches("scales-of-other-outputs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_float64(form, dtype):
    """Of what the codes stand for; in 16 bits two roundings, of the sum and of its scaled self."""
    weight, _ = matrix(form)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 96)) * 300, dtype)
    codes, scales = (np.asarray(weight.parts[n].astype("f"), "d") for n in ("codes", "scales"))
    wanted = np.einsum("bsd,dnh->bsnh", np.asarray(x, "d"), codes) * scales
    found = np.asarray(linear(x, weight), "d")
    size = np.einsum("bsd,dnh->bsnh", np.abs(np.asarray(x, "d")), np.abs(codes)) * scales
    eps = float(jnp.finfo(dtype).eps)
    rounded = (2 if dtype == "bfloat16" else 1) * eps * np.abs(wanted) + 2e-6 * size
    assert np.all(np.abs(found - wanted) <= rounded)
    np.testing.assert_allclose(weight.gathered(), codes * scales, rtol=1e-6, atol=0)


@pytest.mark.catches("sums-of-experts-codes-overflow")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_of_experts_are_those_of_float64(dtype):
    noise = np.random.default_rng(2)
    w = noise.normal(size=(3, 96, 40)).astype(np.float32) / 8
    dims = ("experts", "expert_embed", "expert_mlp")
    packing = Packing(form="int8", double=False, shape=w.shape, dims=dims, contract=1, apart=1)
    parts = quantised(packing, jnp.asarray(w))
    rows, sizes = jnp.asarray(noise.normal(size=(9, 96)) * 300, dtype), np.array([4, 0, 5])
    arrays = {"up": parts["codes"], "up_scales": parts["scales"]}
    local = LocalExperts(arrays=arrays, gradients={}, sizes=jnp.asarray(sizes), share=1)
    found = np.asarray(local.times(rows, "up"), "d")
    codes, scales = (np.asarray(parts[name], "d") for name in ("codes", "scales"))
    of = np.repeat(np.arange(3), sizes)
    wanted = np.einsum("rd,rdf->rf", np.asarray(rows, "d"), codes[of]) * scales[of]
    bound = 2 * float(jnp.finfo(dtype).eps) * np.abs(wanted).max() + 1e-3
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound)


@pytest.mark.catches("expert-scales-left-out")
@pytest.mark.parametrize(("case", "form"), QUICK)
def test_logits_are_those_of_what_codes_stand_for(folder, case, form):
    assert_logits_stand_for(folder, case, form)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("case", "form"), [one for one in itertools.product(TEXTS, FORMS) if one not in QUICK]
)
def test_logits_of_every_family(folder, case, form):
    assert_logits_stand_for(folder, case, form)


def assert_logits_stand_for(folder, case, form):
    """Codes made by NumPy, multiplied in a model as any other; all matrices but a few are there."""
    model, tokens = loaded(folder, case, form), expected(case)["input_ids"]
    wanted = logits(stood_for(folder, case, form).load(devices=jax.devices()[:1]), tokens)
    found, bound = logits(model, tokens), 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound)
    coded = {i.stood_at for i in jax.tree.leaves(model.spec.infos) if i.quantised is not None}
    whole = jax.tree.leaves(stored(folder, case).load(devices=jax.devices()[:1]).spec.infos)
    assert coded == {info.path for info in whole if input_axes(info) is not None}


@functools.cache
def alone(folder, case, form):
    return logits(loaded(folder, case, form), four_rows(case))


def four_rows(case):
    """One for each device."""
    return np.tile(expected(case)["input_ids"][:, :8], (4, 1))[:4]


MESHES = [("llama", "fsdp 2, tensor 2"), ("mixtral", "expert 2, tensor 2")]
MESHES += [("mixtral", "expert 2, fsdp 2"), ("mixtral", "fsdp 2, tensor 2")]
MESHES += [(case, name) for case in ("llama", "mixtral") for name in ("host memory", "stage 2")]


@pytest.mark.parametrize(("case", "name"), quick_first(MESHES, MESHES[:2]))
def test_any_mesh_says_what_one_device_says(folder, case, name):
    model = loaded(folder, case, "int8", PLANS[name])
    prompt = tuple(expected(case)["prompt"].tolist())
    one = loaded(folder, case, "int8").generator(slots=32).generate(prompt, max_tokens=8)
    assert model.generator(slots=32).generate(prompt, max_tokens=8).tokens == one.tokens
    if "stage" not in name and "host" not in name:
        wanted = alone(folder, case, "int8")
        np.testing.assert_allclose(logits(model, four_rows(case)), wanted, rtol=0, atol=1e-5)


@pytest.mark.catches("scales-whole")
def test_codes_lie_as_their_matrix_and_scales_as_its_outputs(folder):
    plan = PLANS["fsdp 2, tensor 2"]
    model = loaded(folder, "llama", "int8", plan)
    whole = stored(folder, "llama").load(plan, jax.devices()[:4])
    lies = {i.path: x.sharding.spec for i, x in pairs(whole)}
    for info, x in pairs(model):
        if info.quantised is None:
            continue
        spec = [*lies[info.stood_at], *[None] * (x.ndim + 1)]
        if info.quantised.name == "codes":
            assert x.sharding == whole_sharding(whole, info.stood_at)
        else:
            layers, contract = int(info.stacked), info.quantised.of.contract
            assert [*x.sharding.spec, *[None] * x.ndim][: x.ndim] == [
                *spec[:layers],
                *spec[layers + contract :],
            ][: x.ndim]


def pairs(model):
    return list(zip(jax.tree.leaves(model.spec.infos), jax.tree.leaves(model.params), strict=True))


def whole_sharding(model, path):
    return next(x.sharding for info, x in pairs(model) if info.path == path)


@pytest.mark.parametrize(
    ("case", "name"),
    quick_first(
        [("llama", "one"), ("llama", "fsdp 2, tensor 2"), ("mixtral", "expert 2, tensor 2")],
        [("llama", "one")],
    ),
)
def test_an_engine_serves_codes_as_a_generator_does(folder, case, name):
    plan = PLANS.get(name, Plan(mesh={"fsdp": 1}))
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    model = stored(folder, case).load(plan, devices, unroll=True, weights="int8")
    prompt = tuple(expected(case)["prompt"].tolist())
    asked = [EngineRequest(prompt=prompt[:n], max_tokens=8) for n in (len(prompt), 3)]
    engine = model.engine(slots=32, seats=2, page_tokens=4, mixed_tokens=8)
    generator = loaded(folder, case, "int8").generator(slots=32)
    for found, one in zip(engine.generate_all(asked), asked, strict=True):
        wanted = generator.generate(one.prompt, max_tokens=8).tokens
        assert tuple(x.token for x in found) == wanted


@pytest.mark.catches("head-in-floats")
@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_half_of_bfloat16s(folder, form):
    model = loaded(folder, "llama", form)
    own = {"codes": 0, "scales": 0, "": 0}
    for info, x in pairs(model):
        own["" if info.quantised is None else info.quantised.name] += x.nbytes
    whole = stored(folder, "llama").load(devices=jax.devices()[:1])
    matrices = sum(x.nbytes for info, x in pairs(whole) if input_axes(info) is not None)
    assert own["codes"] * 4 == matrices  # float32's
    assert own["scales"] < own["codes"] / 4  # of a model 32 wide
    assert model.weight_bytes == (sum(own.values()), 0)
    assert own[""] == whole.weight_bytes[0] - matrices


@pytest.mark.catches("codes-through-the-device")
@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"fsdp": 2, "tensor": 2}])
def test_stacks_of_codes_in_host_memory_pass_through_no_device(folder, monkeypatch, mesh):
    devices, made = jax.devices()[: math.prod(mesh.values())], quantising.quantised
    model = stored(folder, "llama")
    wanted = pairs(model.load(Plan(mesh=mesh), devices, weights="int8"))
    there = {x.shape for info, x in wanted if info.quantised is not None and info.stacked}
    before, found = {id(x) for x in jax.live_arrays()}, []

    def counted(packing, w, columns):
        live = [x for x in jax.live_arrays() if id(x) not in before]
        found.extend(
            x.sharding.memory_kind for x in live if x.dtype == jnp.int8 and x.shape in there
        )
        return made(packing, w, columns)

    monkeypatch.setattr(quantising, "quantised", counted)
    plan = Plan(mesh=mesh, offload=OffloadConfig(parameters=1.0))
    loaded = model.load(plan, devices, weights="int8")
    assert len(found) > 8 and set(found) == {"pinned_host"}
    for (info, x), (_, y) in zip(wanted, pairs(loaded), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=info.path)


@pytest.mark.catches("matrices-all-at-once")
def test_one_matrix_is_in_floats_at_a_time(folder, monkeypatch):
    """Live arrays are counted whenever codes are made."""
    model = stored(folder, "llama")
    most, made = [], quantising.quantised
    before = {id(x) for x in jax.live_arrays()}

    def counted(packing, w, columns):
        live = [x for x in jax.live_arrays() if id(x) not in before]
        floats = [x.size for x in live if x.dtype == w.dtype and x.ndim > 1]
        most.append((sum(floats), w.size))
        return made(packing, w, columns)

    monkeypatch.setattr(quantising, "quantised", counted)
    loaded = model.load(devices=jax.devices()[:1], weights="int8")
    plain = sum(x.size for info, x in pairs(loaded) if x.dtype == jnp.float32 and x.ndim > 1)
    assert len(most) > 8
    for floats, own in most:
        assert floats <= own + plain


@pytest.mark.catches("weights-not-asked-for")
def test_from_the_command_line(folder, capsys):
    prompt = tuple(expected("llama")["prompt"].tolist())
    own, codes = (
        loaded(folder, "llama", form).generator(slots=64).generate(prompt, max_tokens=24).tokens
        for form in ("own", "fp8")
    )
    assert own != codes
    words = ["generate", str(folder / "llama"), f"--prompt-tokens={','.join(map(str, prompt))}"]
    words += ["--max-tokens=24", "--devices=1", "--no-cache", "--weights=fp8"]
    assert main(words) == 0
    assert capsys.readouterr().out == ",".join(map(str, codes)) + "\n"


WIDE = {"vocab": 64, "embed": 64, "layers": 2, "heads": 2, "mlp": 128, "max_seq": 16}


@pytest.mark.catches("four-bits-not-asked-for")
def test_four_bits_are_those_of_a_frozen_base(tmp_path):
    """Of the maps of layers; the head stays."""
    config = LlamaConfig(kv_heads=2, **WIDE)
    bound = Plan().bind(jax.devices()[:1])
    with use(bound):
        spec = describe(maker(config))
    params = fresh_params(config, spec, bound, jax.random.key(2))
    whole = written(tmp_path / "whole", config, spec, params)
    model = whole.load(devices=jax.devices()[:1], weights="nf4")
    of = {i.stood_at: i.quantised.of for i, _ in pairs(model) if i.quantised is not None}
    assert set(of) == {i.path for i in jax.tree.leaves(spec.infos) if i.path.endswith("/w")} - {
        "head/w"
    }

    def back(info, w):
        if info.path not in of:
            return w
        return np.stack([through_codes(of[info.path], np.asarray(row)) for row in w])

    other = written(tmp_path / "other", config, spec, jax.tree.map(back, spec.infos, params))
    tokens = np.arange(8)[None]
    wanted = logits(other.load(devices=jax.devices()[:1]), tokens)
    np.testing.assert_allclose(logits(model, tokens), wanted, rtol=0, atol=1e-5)


@pytest.mark.catches("weights-beside-an-adapter")
def test_what_cannot_be_kept_in_codes_is_refused(folder):
    with pytest.raises(InputError, match="weights: found 'int5'; give own, int8, fp8, nf4, int4"):
        loaded(folder, "llama", "int5")
    config = MixtralConfig(kv_heads=2, experts=4, choices=2, **WIDE)
    with pytest.raises(InputError, match="weights: '.*mlp' has experts.*give weights own"):
        describe(with_served(maker(config), "nf4"))
    with pytest.raises(InputError, match="weights: nf4 keeps blocks of 64.*give weights int8"):
        loaded(folder, "llama", "nf4")
    weight, _ = matrix("int8")
    with pytest.raises(InputError, match="weights: rows are read"):
        weight.rows(jnp.zeros((1, 1), jnp.int32))
    adapter = dataclasses.replace(stored(folder, "llama"), adapter=AdapterConfig(rank=2))
    with pytest.raises(InputError, match="is an adapter.*export it merged, or give own"):
        adapter.load(weights="int8")
