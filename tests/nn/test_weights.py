"""Weights of another kind in a model that the library builds: all are asked, none is passed by."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.config import OffloadConfig, Plan, Segment
from colossax.errors import InputError
from colossax.models import LlamaConfig, maker
from colossax.nn import FlatTokens, Linear, describe, param, weight_of, with_weights
from colossax.optim import sgd
from colossax.planner import build_step
from colossax.sharding import linears
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.fresh import fresh_state
from tests.nn.wrapping import Adapted, Wrapping
from tests.oracle import assert_losses_close

CONFIG = LlamaConfig(vocab=64, embed=32, layers=3, heads=4, kv_heads=2, mlp=48, max_seq=16)
SEGMENTS = (Segment(count=1), Segment(count=2))
PLANS = {
    "one device": Plan(mesh={"fsdp": 1}, segments=SEGMENTS),
    "fsdp and tensor": Plan(mesh={"fsdp": 2, "tensor": 2}, segments=SEGMENTS),
    "2d": Plan(mesh={"row": 2, "col": 2}, tensor_layout="2d", segments=SEGMENTS),
    "host memory": Plan(
        mesh={"fsdp": 2, "tensor": 2},
        segments=SEGMENTS,
        offload=OffloadConfig(parameters=1.0, optimizer=1.0),
    ),
}
SEVEN = {"attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down"}
ASKED: set[tuple[str, str]] = set()
"""What was asked of which weight."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counted(Wrapping):
    """A weight that notes what it is asked, and has another one do it."""

    base: Any
    name: str = dataclasses.field(metadata={"static": True})

    @staticmethod
    def multiply(x, maps, *, contract):
        ASKED.update(("multiply", own.name) for own, _ in maps)
        return linears(x, [(own.base, bias) for own, bias in maps], contract=contract)

    def rows(self, ids):
        ASKED.add(("rows", self.name))
        return super().rows(ids)

    def gathered(self, *, to=None):
        ASKED.add(("gathered", self.name))
        return super().gathered(to=to)


class CountedHolder(nnx.Module):
    def __init__(self, name, module):
        self.name, self.dims, self.base = name, module.dims, module.held

    @property
    def weight(self):
        return Counted(weight_of(self.base, self.dims), self.name)


def counted(config):
    return with_weights(maker(config), lambda name, module, rngs: CountedHolder(name, module))


def batch(rows=4, seq=8):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (rows, seq + 1)).astype(np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((rows, seq), np.float32),
    }


@pytest.mark.catches("weights-of-qkv-bypassed")
@pytest.mark.catches("weight-of-head-bypassed")
@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_of_a_llama_is_asked(tied):
    """Of the loss, as of logits."""
    config = dataclasses.replace(CONFIG, tied=tied)
    head = ("gathered", "embed" if tied else "head")
    want = {("rows", "embed"), head, *(("multiply", name) for name in SEVEN)}
    rows = jax.tree.map(jnp.asarray, batch())
    for asks in (lambda m: next_token_loss()(m, rows), lambda m: m(rows["tokens"])):
        ASKED.clear()
        nnx.eval_shape(lambda asks=asks: asks(counted(config)(nnx.Rngs(0))))
        assert ASKED == want


def test_generation_asks_them_too():
    def next_hidden():
        model = counted(CONFIG)(nnx.Rngs(0))
        t = jnp.arange(4, dtype=jnp.int32)
        flat = FlatTokens(seat=0 * t, position=t, slot=t)
        cache = model.cache_spec(seats=1, slots=8).zeros(jnp.float32)
        return model.logits(model.decode(t, cache, flat)[0])

    ASKED.clear()
    nnx.eval_shape(next_hidden)
    assert {name for _, name in ASKED} == {*SEVEN, "embed", "head"}


def step_of(make_model, plan, **options):
    devices = jax.devices()[: 1 if plan == "one device" else 4]
    return build_step(
        make_model, sgd(0.1), next_token_loss(), PLANS[plan], devices=devices, **options
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_weight_that_adds_nothing_is_the_same_program(plan):
    """Forward, backward and update, in every line: so loss and gradients are the same bits."""

    def program(make_model):
        step = step_of(make_model, plan)
        text = step.lower(step.abstract, step.abstract_batch(shapes)).as_text()
        return re.sub(r"jax\.(result_info|arg_info) = \"[^\"]*\"", "", text)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    assert program(counted(CONFIG)) == program(maker(CONFIG))


class Adapter(nnx.Module):
    """A matrix plus the product of two narrow ones, the second of which begins with zeros."""

    def __init__(self, module, rngs, rank=2):
        self.dims, inner = module.dims, module.contract
        self.base = module.held
        shape = module.weight.shape
        narrow = jax.random.normal(rngs.params(), (*shape[:inner], rank))
        self.down = param(narrow, (*module.dims[:inner], None))
        self.up = param(jnp.zeros((rank, *shape[inner:])), (None, *module.dims[inner:]))

    @property
    def weight(self):
        inner = len(self.down.shape) - 1
        down = weight_of(self.down, (*self.dims[:inner], None))
        up = weight_of(self.up, (None, *self.dims[inner:]))
        return Adapted(weight_of(self.base, self.dims), down, up)


def adapted(name, module, rngs):
    return Adapter(module, rngs) if name in ("attn/q", "attn/v", "mlp/down") else None


@pytest.mark.parametrize("plan", quick_first(["2d", "fsdp and tensor"], 2))
def test_parts_are_parameters_that_learn_or_do_not(plan):
    """Adapters in several segments: the loss begins as without, and they alone are trained."""

    def learns(info):
        return info.path.endswith(("/w/down", "/w/up"))

    step = step_of(with_weights(maker(CONFIG), adapted), plan, trainable=learns)
    infos = {info.path: info for info in jax.tree.leaves(step.spec.infos)}
    assert infos["layers/attn/q/w/base"].dims == ("layers", "embed", "heads", "head_dim")
    assert infos["layers/attn/v/w/up"].dims == ("layers", None, "kv_heads", "head_dim")
    state = step.init()
    before = jax.tree.map(np.asarray, state["params"])
    assert_drawn_for_each_layer(before["layers"]["segments"])
    state, metrics = step(state, batch())
    assert_losses_close(metrics["loss"], plain_loss())

    def check(info, old, new):
        # A narrow matrix learns once the one behind it is no longer zero.
        assert bool(np.any(old != np.asarray(new))) == info.path.endswith("/w/up"), info.path

    jax.tree.map(check, step.spec.infos, before, state["params"])


def assert_drawn_for_each_layer(segments):
    first, (second, third) = (segment["attn"]["q"]["w"]["down"] for segment in segments.values())
    assert first.shape == second.shape == (32, 2)
    assert np.any(first != second) and np.any(second != third)


@functools.cache
def plain_loss():
    step = step_of(maker(CONFIG), "one device")
    total, weight = step.evaluate(fresh_state(CONFIG, step), batch())["cross_entropy"]
    return np.asarray(total / weight)


def test_makers_nest_and_change_nothing_that_is_drawn():
    def model(make):
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(0)), nnx.Param))

    plain, twice = model(maker(CONFIG)), model(with_weights(counted(CONFIG), adapted))
    for one in ("q", "k"):
        old, new = (tree["layers"]["segments"][0]["attn"][one]["w"] for tree in (plain, twice))
        new = new["base"]["base"] if one == "q" else new["base"]
        np.testing.assert_array_equal(new, old)


def test_what_has_no_weight_is_refused():
    def nothing(name, module, rngs):
        return nnx.Module() if isinstance(module, Linear) else None

    with pytest.raises(InputError, match="'attn/.' needs a weight of shape .* Module has none"):
        describe(with_weights(maker(CONFIG), nothing))
