"""Matrices in groups of four bits, and sparse ones: what is kept, multiplied, served, refused."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.cli import main
from colossax.config import OffloadConfig, Plan, Precision
from colossax.errors import InputError
from colossax.models import MixtralConfig, maker
from colossax.nn import describe
from colossax.nn.quantised.codes import Packing, quantised
from colossax.nn.quantised.forms import form_of
from colossax.nn.quantised.made import GroupedWeight, SparseWeight
from colossax.nn.quantised.serving import with_served
from colossax.scheduling import EngineRequest
from colossax.sharding import linear
from tests.cases import quick_first
from tests.inference.weights.made import golden, logits, stored
from tests.inference.weights.packed import (
    contracted,
    grouped,
    is_map,
    model_of,
    stands_for,
    thinned,
)
from tests.models.test_parity import TEXTS, expected

pytestmark = pytest.mark.slow

SPARSE = ("2:4", "1:4")
FORMS = ("int4:8", "int4-sym:8", *SPARSE)
QUICK = [("llama", "int4:8"), ("bloom", "1:4")]
PLANS = {
    "fsdp 2, tensor 2": Plan(mesh={"fsdp": 2, "tensor": 2}),
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


def pairs(model):
    return list(zip(jax.tree.leaves(model.spec.infos), jax.tree.leaves(model.params), strict=True))


def packing(form, shape, contract=1):
    asked = form_of(form)
    dims = ("heads", "head_dim", "embed") if contract == 2 else ("embed", "heads", "head_dim")
    return Packing(
        form=asked.name, double=False, shape=shape, dims=dims, contract=contract, group=asked.group
    )


def matrix(shape, seed=0):
    """A random one: outputs of other sizes, a group of zeros, one above 0, one below."""
    w = np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 8
    flat = w.reshape(-1, 6)
    flat[:, 1] *= 30
    flat[:16, 2], flat[:16, 3], flat[:16, 4] = 0, abs(flat[:16, 3]), -abs(flat[:16, 4])
    return w


@pytest.mark.catches("nibbles-swapped")
@pytest.mark.parametrize("zeros", [True, False])
def test_codes_of_groups_are_those_made_one_by_one(zeros):
    w = matrix((64, 2, 3))
    parts = quantised(packing("int4:16" if zeros else "int4-sym:16", w.shape), jnp.asarray(w))
    codes, scales, zero, _ = grouped(w.reshape(64, 6), 16, zeros=zeros)
    pairs = codes.reshape(32, 2, 6)
    np.testing.assert_array_equal(
        parts["codes"].reshape(32, 6), pairs[:, 0] | pairs[:, 1] << np.uint8(4)
    )
    assert parts["scales"].dtype == jnp.bfloat16 and parts["codes"].dtype == jnp.uint8
    np.testing.assert_array_equal(parts["scales"].reshape(4, 6), scales)
    assert ("zeros" in parts) == zeros
    if zeros:
        np.testing.assert_array_equal(parts["zeros"].reshape(4, 6), zero)
        assert set(zero[0]) >= {0, 15}  # nothing below 0, nothing above


@pytest.mark.catches("smallest-kept")
@pytest.mark.parametrize("form", SPARSE)
def test_sparse_ones_keep_the_largest_of_each_four(form):
    w = matrix((32, 2, 3))
    w[4:8, 0, 0] = 1, -1, 1, -1  # of the equal ones the first
    one = packing(form, w.shape)
    parts, kept = quantised(one, jnp.asarray(w)), int(form[0])
    assert parts["values"].shape == parts["index"].shape == (kept, 2, 3, 8)
    assert parts["index"].dtype == jnp.int8
    found = np.zeros((32, 6), np.float32)
    values, index = (np.asarray(parts[name]).reshape(kept, 6, 8) for name in ("values", "index"))
    for i, column, four in np.ndindex(kept, 6, 8):
        found[4 * four + index[i, column, four], column] = values[i, column, four]
    np.testing.assert_array_equal(found, thinned(w.reshape(32, 6), kept))
    again = quantised(one, jnp.asarray(found.reshape(w.shape)))
    np.testing.assert_array_equal(again["values"], parts["values"])  # of a sparse one all is kept


@pytest.mark.catches("scales-of-other-groups")
@pytest.mark.catches("zeros-left-out")
@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", ("int4:16", "int4-sym:16", *SPARSE))
def test_products_are_those_of_float64(form, dtype, contract):
    shape = (4, 16, 6) if contract == 2 else (64, 2, 3)
    one, w = packing(form, shape, contract), matrix(shape)
    kind = SparseWeight if form in SPARSE else GroupedWeight
    weight = kind(quantised(one, jnp.asarray(w)), one)
    wanted = np.asarray(stands_for(w, contract, form), "d")
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(weight.gathered(), wanted, rtol=1e-6, atol=0)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, *shape[:contract])), dtype)
    sums = np.tensordot(np.asarray(x, "d"), wanted, contract)
    size = np.tensordot(abs(np.asarray(x, "d")), abs(wanted), contract)
    found = np.asarray(linear(x, weight, contract=contract), "d")
    assert found.shape == sums.shape
    assert np.all(np.abs(found - sums) <= eps * np.abs(sums) + (eps + 2e-6) * size)


def dense(case):
    """Whether there are no experts, whose matrices are kept in eight bits or as they are."""
    return not any("experts" in info.dims for info in jax.tree.leaves(golden(case)[1].infos))


@pytest.mark.parametrize(("case", "form"), QUICK)
def test_logits_are_those_of_what_is_kept(folder, case, form):
    assert_logits_stand_for(folder, case, form)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("case", "form"), [one for one in itertools.product(TEXTS, FORMS) if one not in QUICK]
)
def test_logits_of_every_family(folder, case, form):
    if not dense(case):
        with pytest.raises(InputError, match="has experts.*give weights int8, fp8 or own"):
            loaded(folder, case, form)
        return
    assert_logits_stand_for(folder, case, form)


def assert_logits_stand_for(folder, case, form):
    """Made by NumPy one by one, multiplied in a model as any other; all maps of layers are."""
    model, tokens = loaded(folder, case, form), expected(case)["input_ids"]
    wanted = logits(model_of(folder, case, form).load(devices=jax.devices()[:1]), tokens)
    found, bound = logits(model, tokens), 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound)
    coded = {i.stood_at for i in jax.tree.leaves(model.spec.infos) if i.quantised is not None}
    whole = stored(folder, case).load(devices=jax.devices()[:1])
    maps = {info.path: (info, x) for info, x in pairs(whole) if is_map(info)}
    assert coded == maps.keys()
    for info, _ in maps.values():
        assert next(
            i.quantised.of.contract
            for i in jax.tree.leaves(model.spec.infos)
            if i.stood_at == info.path and i.quantised is not None
        ) == contracted(info)


@pytest.mark.parametrize(
    ("name", "form"),
    quick_first(list(itertools.product(PLANS, ("int4:4", "2:4"))), [("fsdp 2, tensor 2", "2:4")]),
)
def test_any_mesh_says_what_one_device_says(folder, name, form):
    prompt = tuple(expected("llama")["prompt"].tolist())
    one = loaded(folder, "llama", form).generator(slots=32).generate(prompt, max_tokens=8)
    model = loaded(folder, "llama", form, PLANS[name])
    assert model.generator(slots=32).generate(prompt, max_tokens=8).tokens == one.tokens


@pytest.mark.parametrize("form", quick_first(("int4:8", "1:4"), ["int4:8"]))
def test_an_engine_serves_them_as_a_generator_does(folder, form):
    model = stored(folder, "llama").load(
        Plan(mesh={"fsdp": 1}), jax.devices()[:1], unroll=True, weights=form
    )
    prompt = tuple(expected("llama")["prompt"].tolist())
    engine = model.engine(slots=32, seats=2, page_tokens=4, mixed_tokens=8)
    (found,) = engine.generate_all([EngineRequest(prompt=prompt, max_tokens=8)])
    wanted = loaded(folder, "llama", form).generator(slots=32).generate(prompt, max_tokens=8)
    assert tuple(x.token for x in found) == wanted.tokens


@pytest.mark.parametrize(("form", "bits"), [("int4:8", 4), ("2:4", 20), ("1:4", 10)])
def test_bytes_are_those_that_are_promised(folder, form, bits):
    """Of float32, an index of eight bits beside it; of groups of 8 two bits and one in addition."""
    model = loaded(folder, "llama", form)
    whole = stored(folder, "llama").load(devices=jax.devices()[:1])
    maps = sum(x.size for info, x in pairs(whole) if is_map(info))
    kept = sum(x.nbytes for info, x in pairs(model) if info.quantised is not None)
    assert kept * 8 == maps * (bits + (3 if form == "int4:8" else 0))
    count = whole.spec.parameter_count()
    assert model.spec.parameter_count() == count


@pytest.mark.catches("values-of-another-type")
def test_sparse_values_are_of_the_plans_type(folder):
    bf16 = Precision(params="bfloat16", compute="bfloat16", cache="bfloat16")
    model = loaded(folder, "llama", "2:4", Plan(precision=bf16))
    for info, x in pairs(model):
        assert x.dtype == ("int8" if info.path.endswith("/index") else "bfloat16"), info.path


def test_from_the_command_line(folder, capsys):
    prompt = tuple(expected("llama")["prompt"].tolist())
    own, codes = (
        loaded(folder, "llama", form).generator(slots=64).generate(prompt, max_tokens=24).tokens
        for form in ("own", "int4-sym:8")
    )
    assert own != codes
    words = ["generate", str(folder / "llama"), f"--prompt-tokens={','.join(map(str, prompt))}"]
    words += ["--max-tokens=24", "--devices=1", "--no-cache", "--weights=int4-sym:8"]
    assert main(words) == 0
    assert capsys.readouterr().out == ",".join(map(str, codes)) + "\n"


@pytest.mark.catches("groups-unchecked")
def test_what_does_not_fit_is_refused(folder, capsys):
    for asked in ("int5", "int4:", "int4:0", "3:4", "nf4:64"):
        with pytest.raises(InputError, match=f"weights: found '{asked}'; give own, int8.*or 1:4"):
            form_of(asked)
    with pytest.raises(InputError, match="groups of 7 inputs, two of which share a byte"):
        form_of("int4:7")
    with pytest.raises(InputError, match="weights: int4 keeps groups of 128 inputs, and '.*int4:G"):
        loaded(folder, "llama", "int4")
    sizes = {"vocab": 64, "embed": 64, "layers": 2, "heads": 2, "mlp": 128, "max_seq": 16}
    config = MixtralConfig(kv_heads=2, experts=4, choices=2, **sizes)
    for form in ("int4:8", "2:4"):
        with pytest.raises(InputError, match="has experts.*give weights int8, fp8 or own"):
            describe(with_served(maker(config), form))
    one = packing("2:4", (6, 2, 3))
    with pytest.raises(InputError, match="weights: 2:4 keeps some of each 4 inputs, and 'q' has 6"):
        one.check("q", "weights")
    assert main(["generate", str(folder / "llama"), "--prompt-tokens=1", "--weights=int3"]) == 2
    assert "weights: found 'int3'" in capsys.readouterr().err
