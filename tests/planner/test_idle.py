"""Any Flax model is split over the mesh, with the losses of one device; what is not is said."""

import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax import Plan, boost, build_step, preset
from colossax.errors import PlanWarning
from colossax.models import maker
from colossax.planner.idle import warn_of_idle
from tests.cases import quick_first
from tests.models.test_families import TINY
from tests.nn.plain import MLP, Convolved, Gemma, Transformer, UNet, ViT


class Mixed(nnx.Module):
    """Convolutions beside a map that the tensor axis splits."""

    def __init__(self, rngs):
        self.convolved = Convolved(16, 32, rngs=rngs)
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(self.convolved(x))


def wide_vit(rngs):
    """Of whose parameters the kernel that reads three colours is less than a tenth."""
    return ViT(rngs, width=64)


INPUTS = {
    Mixed: (16, 4, 4, 16),
    MLP: (16, 48),
    ViT: (16, 16, 16, 3),
    wide_vit: (16, 16, 16, 3),
    UNet: (16, 8, 8, 3),
}


def batch_of(make_model):
    rng = np.random.default_rng(0)
    if make_model in INPUTS:
        return {"x": rng.normal(size=INPUTS[make_model]).astype(np.float32)}
    return {"x": rng.integers(0, 64, (16, 8)).astype(np.int32)}


def loss(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - 0.5))


def boosted(make_model, plan, **options):
    x = batch_of(make_model)["x"]
    dims = {"x": ("batch", *(None,) * (x.ndim - 1))}
    return boost(make_model, optax.adam(1e-2), loss, plan, batch_dims=dims, **options)


def losses(make_model, mesh):
    devices = jax.devices()[: np.prod(list(mesh.values()))]
    state, step = boosted(make_model, Plan(mesh=mesh), devices=devices)
    found = []
    for _ in range(3):
        state, metrics = step(state, batch_of(make_model))
        found.append(float(metrics["loss"]))
    return found


EVERYWHERE = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.catches("convolutions-left-split")
@pytest.mark.parametrize(
    "make_model, mesh",
    [
        (MLP, EVERYWHERE),
        (Transformer, EVERYWHERE),
        (wide_vit, EVERYWHERE),
        (Gemma, EVERYWHERE),
        (UNet, EVERYWHERE),
        (UNet, {"fsdp": 2, "tensor": 4}),
        (Mixed, EVERYWHERE),
    ],
)
def test_a_plain_model_has_the_losses_of_one_device(make_model, mesh):
    whole = losses(make_model, {"data": 1})
    split = losses(make_model, mesh)
    np.testing.assert_allclose(split, whole, rtol=1e-5)


@pytest.mark.catches("names-not-found")
@pytest.mark.catches("names-unused")
@pytest.mark.parametrize("make_model", [MLP, Transformer, ViT, UNet, Gemma])
def test_a_device_holds_little_more_than_its_part(make_model):
    step = build_step(make_model, optax.adam(1e-2), loss, Plan(mesh={"fsdp": 4, "tensor": 2}))
    leaves = jax.tree.leaves(step.abstract["params"])
    held = sum(np.prod(x.sharding.shard_shape(x.shape)) for x in leaves)
    assert held <= 0.3 * sum(np.prod(x.shape) for x in leaves)


def warned(make_model, plan, **options):
    """The text of the one warning, or empty."""
    step = build_step(make_model, optax.sgd(1e-2), loss, plan, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_idle(step.bound, step.spec)
    assert len(found) <= 1 and all(one.category is PlanWarning for one in found)
    text = str(found[0].message) if found else ""
    assert "\n" not in text
    return text


def nameless(rngs):
    return nnx.Dict(w=nnx.Param(jnp.ones((1, 64))), v=nnx.Param(jnp.ones((8,))))


SAID = [
    (
        MLP,
        {"fsdp": 4, "tensor": 2},
        {"kernel": ("embed", None), "bias": (None,)},
        "axis 'tensor' of 2 devices .* and does nothing; name",
    ),
    (nameless, {"data": 4, "tensor": 2}, {}, "axis 'tensor' of 2 devices splits no parameter"),
    (nameless, {"fsdp": 8}, {}, r"^89% of .* stay whole on every device: w \[1, 64\]; "),
    (
        MLP,
        {"fsdp": 8},
        {"kernel": (None, None)},
        r"stay whole on every device: first/kernel \[48, 32\], sec",
    ),
    (MLP, {"fsdp": 8}, {"st/kernel": ("wide", None)}, "dims that no rule knows: 'wide' of 1; name"),
    (
        lambda rngs: Transformer(rngs, vocab=63),
        {"fsdp": 4, "tensor": 2},
        {},
        "not divided by the devices .*: embed/embedding 'vocab' of 63, head/kernel 'vocab' of 63",
    ),
]


@pytest.mark.catches("idle-unsaid")
@pytest.mark.parametrize("make_model, mesh, dims, message", SAID)
def test_what_is_not_split_is_said_in_one_line(make_model, mesh, dims, message):
    assert re.search(message, warned(make_model, Plan(mesh=mesh), dims=dims))


def test_boost_says_it_where_it_is_called():
    with pytest.warns(PlanWarning, match="stay whole"):
        boost(nameless, optax.sgd(1e-2), loss, "zero3")


SILENT = ["ddp", "zero1", "zero2", "zero3", "zero3+megatron", "zero3+megatron_sp+ring", "usp"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, name", quick_first(itertools.product(TINY, SILENT), quick=6 * len(SILENT) - 1)
)
def test_own_models_are_split_without_a_word(family, name):
    mesh = {"zero3+megatron": {"fsdp": 2, "tensor": 2}, "usp": {"ring": 2, "ulysses": 2}}
    mesh |= {"zero3+megatron_sp+ring": {"fsdp": 1, "tensor": 2, "ring": 2}}
    axis = "data" if name == "ddp" else "fsdp"
    plan = preset(name).replace(mesh=mesh.get(name, {axis: 4}))
    assert warned(maker(TINY[family]), plan, devices=jax.devices()[:4]) == ""
