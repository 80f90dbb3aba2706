"""Packed matrices of models multiplied by kernels, interpreted or in the kernels' place."""

import dataclasses
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan, Precision
from colossax.inference import open_checkpoint
from colossax.inference.plan import inference_plan
from colossax.models import LlamaConfig, maker
from colossax.nn import describe
from colossax.nn.quantised.by_kernel import grouped_product, sparse_product
from colossax.nn.quantised.codes import Packing, quantised
from colossax.nn.quantised.made import GroupedWeight, SparseWeight
from colossax.pallas import target
from colossax.pallas.int4_matmul import api as int4
from colossax.pallas.sparse_matmul import api as sparse
from colossax.sharding import use
from tests.cases import quick_first
from tests.inference.weights.made import written
from tests.pallas.places import no_races

pytestmark = pytest.mark.slow

SMALL = LlamaConfig(vocab=64, embed=128, layers=1, heads=2, kv_heads=2, mlp=256, max_seq=64)
LARGE = LlamaConfig(vocab=64, embed=256, layers=2, heads=4, kv_heads=4, mlp=512, max_seq=64)
BF16 = Precision(params="bfloat16", compute="bfloat16", cache="bfloat16")
F32 = dataclasses.replace(BF16, compute="float32")
"""Computed in it, of what is kept in bfloat16."""

APIS = {"int4": int4, "int4-sym": int4, "2:4": sparse, "1:4": sparse}
TOKENS = np.random.default_rng(3).integers(0, 64, (2, 5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("stored")
    rng = np.random.default_rng(0)

    def drawn(info):
        scale = 1 / math.sqrt(info.shape[-1]) if len(info.shape) > 1 else 1
        return jnp.asarray(rng.normal(size=info.shape) * scale, jnp.float32)

    for name, config in (("small", SMALL), ("large", LARGE)):
        with use(Plan().bind(jax.devices()[:1])):
            spec = describe(maker(config))
        written(where / name, config, spec, jax.tree.map(drawn, spec.infos))
    return where


def loaded(folder, form, mesh=None, precision=BF16):
    plan = Plan(mesh=mesh or {"fsdp": 1}, precision=precision)
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    return open_checkpoint(folder).load(plan, devices, weights=form)


def recording(module, seen):
    """Takes the place of a kernel, and notes the sizes of what it multiplies."""

    def multiply(x, *parts):
        found = module.multiply(x, *parts)
        seen.append((*x.shape, found.shape[-1]))
        return found

    noted = types.ModuleType("kernels")
    noted.why_not, noted.multiply = module.why_not, multiply
    return noted


def logits(model):
    """Under the plan of a generator: all devices have all tokens."""
    bound = inference_plan(model.bound.plan).bind(model.bound.mesh.devices.flat)

    def of(params, tokens):
        with use(bound):
            return model.spec.merge(params)(tokens)

    return np.asarray(jax.jit(of)(model.params, jnp.asarray(TOKENS)))


def by_kernel(monkeypatch, form, model, name, seen):
    """Logits where what is there counts as the kernel's device, another form in its place."""
    forms = APIS[form].IMPLEMENTATIONS
    with monkeypatch.context() as patched, target("cpu"):
        patched.setitem(forms, "mosaic", recording(forms[name], seen))
        return logits(model)


def distance(found, truth):
    return np.linalg.norm(found - truth) / np.linalg.norm(truth)


def every(quick):
    """Forms, these in each run."""
    return pytest.mark.parametrize("form", quick_first(tuple(APIS), quick))


@pytest.mark.catches("packed-kernel-left-out")
@pytest.mark.catches("sparse-kernel-left-out")
@every(["int4", "1:4"])
def test_logits_by_the_kernel_are_as_near_as_without(folder, form, monkeypatch):
    """To those in float32, of the same codes; of each map whose inputs the kernel takes."""
    truth = logits(loaded(folder / "small", form, precision=F32))
    model, seen = loaded(folder / "small", form), []
    plain = logits(model)
    found = by_kernel(monkeypatch, form, model, "interpret", seen)
    maps = [(256, 128)]
    if form.startswith("int4"):
        maps += [(128, 128)] * 4 + [(128, 256)] * 2
    assert sorted(seen) == sorted((10, *sizes) for sizes in maps)
    assert no_races("interpret")
    assert 0 < distance(found, truth) < 1.2 * distance(plain, truth)


MESHES = {
    "tensor 2": ({"tensor": 2}, {(256, 128), (128, 256), (256, 256)}),
    "fsdp 2, tensor 2": ({"fsdp": 2, "tensor": 2}, {(128, 128), (128, 256), (256, 128)}),
}
"""And inputs and outputs of what a device multiplies."""


@pytest.mark.catches("partial-products-not-summed")
@pytest.mark.parametrize(
    ("name", "form"),
    quick_first(
        list(itertools.product(MESHES, APIS)),
        [("tensor 2", "2:4"), ("fsdp 2, tensor 2", "int4")],
    ),
)
def test_each_device_multiplies_what_it_holds(folder, name, form, monkeypatch):
    """The plain form in the kernel's place; what tensors split is summed up."""
    mesh, sizes = MESHES[name]
    truth = logits(loaded(folder / "large", form, precision=F32))
    model, seen = loaded(folder / "large", form, mesh), []
    plain = logits(model)
    found = by_kernel(monkeypatch, form, model, "xla", seen)
    assert {one[1:] for one in seen} == sizes
    assert 0 < distance(found, truth) < 1.2 * distance(plain, truth)


def packed(form, shape=(256, 2, 64), group=128):
    """A weight and its packing."""
    w = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    dims = ("embed", "heads", "head_dim")
    one = Packing(form=form, double=False, shape=shape, dims=dims, contract=1, group=group)
    return one, quantised(one, jnp.asarray(w))


def weight(packing, parts):
    return (SparseWeight if "index" in parts else GroupedWeight)(parts, packing)


def traced(packing, parts, rows=4, dtype=jnp.bfloat16):
    """What a product is made of, for a Hopper that is not there."""
    x = jax.ShapeDtypeStruct((1, rows, *packing.shape[: packing.contract]), dtype)
    with target("gpu", compute_capability=(9, 0)):
        return str(jax.jit(weight(packing, parts).product).trace(x).jaxpr)


@pytest.mark.catches("kernel-of-other-groups")
def test_what_the_kernel_does_not_take_is_multiplied_as_before():
    for form in APIS:
        assert "wgmma" in traced(*packed(form))
        assert "wgmma" in traced(*packed(form), rows=32)
        assert "wgmma" not in traced(*packed(form), rows=33)
        assert "wgmma" not in traced(*packed(form), dtype=jnp.float32)
        assert "wgmma" not in traced(*packed(form, shape=(256, 1, 64)))
    assert "wgmma" not in traced(*packed("int4", group=64))
    assert "wgmma" not in traced(*packed("2:4", shape=(128, 2, 64)))


@pytest.mark.parametrize(("form", "product"), [("int4", grouped_product), ("2:4", sparse_product)])
def test_an_implementation_may_be_named(form, product):
    packing, parts = packed(form)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 256)), jnp.bfloat16)
    assert product(packing, parts, x) is None
    found = product(packing, parts, x, implementation="xla")
    wanted = weight(packing, parts).product(x.astype(jnp.float32))
    assert found.shape == (3, 2, 64) and distance(np.asarray(found, "f"), wanted) < 1e-2
    with pytest.raises(NotImplementedError, match="_matmul 'mosaic': .*NVIDIA GPU, the target"):
        product(packing, parts, x, implementation="mosaic")


@pytest.mark.catches("kernel-of-split-tokens")
def test_tokens_that_devices_split_are_multiplied_as_before(monkeypatch):
    """Of a plan for training: its batch is split, and no kernel takes a part of it."""
    packing, parts = packed("int4")
    monkeypatch.setitem(int4.IMPLEMENTATIONS, "mosaic", int4.IMPLEMENTATIONS["xla"])
    for mesh, taken in (({"fsdp": 2}, False), ({"tensor": 2}, True)):
        with use(Plan(mesh=mesh).bind(jax.devices()[:2])), target("cpu"):
            found = jax.eval_shape(functools.partial(grouped_product, packing, parts), ROWS)
        assert (found is not None) == taken


ROWS = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)
