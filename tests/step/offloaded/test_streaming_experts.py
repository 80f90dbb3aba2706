"""Experts alone in host memory: the same training, and what lies where."""

import functools

import jax
import numpy as np
import pytest

from colossax.aot import host_arithmetic
from colossax.aot.saved import scopes
from colossax.config import OffloadConfig, Plan, Segment
from colossax.errors import PlanError
from colossax.models import LlamaConfig, MixtralConfig, maker
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.step.offloaded.host_arrays import state_bytes
from colossax.tasks import next_token_loss
from tests.step.offloaded.streamed import batch, by_path, started, stepped

LAYERS, EXPERTS, EMBED, MLP = 3, 4, 16, 24
CONFIG = MixtralConfig(
    vocab=64,
    embed=EMBED,
    layers=LAYERS,
    heads=2,
    kv_heads=1,
    mlp=MLP,
    experts=EXPERTS,
    choices=2,
    max_seq=32,
)
FULL = Segment(remat="full")
EACH = 4 * EXPERTS * EMBED * MLP
"""Bytes of one matrix of a layer's experts."""


def plan(**offload):
    return Plan(mesh={"data": 1}, segments=(FULL,), offload=OffloadConfig(**offload))


def made(clip_norm=1.0, **offload):
    return started(plan(**offload), adamw(1e-2), model=CONFIG, clip_norm=clip_norm)


@functools.cache
def traced():
    _, step = made(experts=1.0)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch().items()}
    return step.jitted.trace(step.abstract, step.abstract_batch(shapes)).jaxpr


@pytest.mark.catches("experts-stay-on-the-device")
@pytest.mark.catches("moments-of-experts-on-the-device")
def test_experts_alone_are_in_host_memory():
    asked = plan(experts=0.6)  # the first two layers
    step = build_step(
        maker(CONFIG), adamw(1e-2), next_token_loss(), asked, devices=jax.devices()[:1]
    )
    state = step.abstract
    for kind in ("params", "opt_state"):
        for path, leaf in jax.tree_util.tree_flatten_with_path(state[kind])[0]:
            there = "host" in (leaf.sharding.memory_kind or "")
            expert = leaf.ndim == 4 and leaf.shape[1] == EXPERTS
            assert there == expert, jax.tree_util.keystr(path)
    found = state_bytes(step, 1)
    assert found["parameters"] == 2 * 3 * EACH
    assert found["optimizer"] == 2 * 3 * EACH * 2  # moments; nothing is clipped


@pytest.mark.sweep
@pytest.mark.catches("experts-not-ahead")
def test_the_next_layers_experts_are_fetched_meanwhile():
    """Forward and backward carry one layer's of them, and nothing computes in host memory."""
    jaxpr = traced()
    assert host_arithmetic(jaxpr) == []
    row = sorted([(EXPERTS, EMBED, MLP), (EXPERTS, EMBED, MLP), (EXPERTS, MLP, EMBED)])
    ahead = 0
    for scope in scopes(jaxpr):
        for equation in scope.eqns:
            if equation.primitive.name in ("while", "scan"):
                here = [v.aval for v in equation.outvars if v.aval.shape in row]
                ahead += sorted(aval.shape for aval in here) == row
    assert ahead >= 2


CASES = [
    {"experts": 1.0},
    {"experts": 0.5},
    {"experts": 1.0, "optimizer": 0.4, "activations": 1.0},
    {"experts": 1.0, "clipping": "two_pass"},
    {"experts": 1.0, "clipping": "speculate"},
    {"experts": 1.0, "clip_norm": None},
]


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(len(CASES)))
def test_training_is_that_of_experts_on_the_device(number):
    case = dict(CASES[number])
    clip_norm = case.pop("clip_norm", 0.5)
    same = {"clip_norm": clip_norm, "clipping": case.get("clipping", "stack")}
    start, device = made(fused=True, **same)
    wanted, losses = stepped(start, device, steps=3)
    start, step = made(clip_norm=clip_norm, **case)
    state, found = stepped(start, step, steps=3)
    for one, other in zip(found, losses, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-6, err_msg=name)
    own, others = (by_path(s, x["params"]) for s, x in ((step, state), (device, wanted)))
    assert own.keys() == others.keys()
    for name, leaf in own.items():
        np.testing.assert_allclose(leaf, others[name], rtol=0, atol=1e-6, err_msg=name)


def test_experts_where_there_are_none_are_refused():
    dense = LlamaConfig(vocab=64, embed=16, layers=2, heads=2, kv_heads=1, mlp=24, max_seq=32)
    with pytest.raises(PlanError, match="no layer of the model has experts that could be in host"):
        started(plan(experts=1.0), adamw(1e-2), model=dense)


def test_stages_take_whole_layers_to_host_memory():
    staged = plan(experts=1.0).replace(mesh={"stage": 3})
    with pytest.raises(PlanError, match="experts go to host memory with their layers; give"):
        started(staged, adamw(1e-2), model=CONFIG, devices=jax.devices()[:3])
