"""Generation with experts in host memory, of which each token's are fetched."""

import functools

import jax
import numpy as np
import pytest

import colossax
from colossax.aot import host_arithmetic
from colossax.aot.saved import scopes
from colossax.checkpoint import Checkpointer, slot_of
from colossax.cli import main
from colossax.config import OffloadConfig, Plan, Segment
from colossax.inference import Generator
from colossax.models import MixtralConfig, config_to_json, maker
from colossax.nn import describe
from colossax.sharding import param_sharding
from tests.fresh import fresh_params

LAYERS, EXPERTS, EMBED, MLP = 3, 8, 32, 48
CONFIG = MixtralConfig(
    vocab=128,
    embed=EMBED,
    layers=LAYERS,
    heads=4,
    kv_heads=2,
    mlp=MLP,
    experts=EXPERTS,
    choices=2,
    max_seq=64,
    init_std=0.3,
)
PROMPT = (3, 17, 99, 4, 56)
EXPERT_BYTES = 4 * LAYERS * EXPERTS * 3 * EMBED * MLP
HOST = OffloadConfig(experts=1.0)
PLANS = {
    "one": Plan(mesh={"data": 1}, offload=HOST),
    "whole layers": Plan(mesh={"data": 1}, offload=OffloadConfig(parameters=1.0)),
    "layer by layer": Plan(mesh={"data": 1}, offload=HOST, segments=(Segment(count=1),) * 3),
    "some": Plan(mesh={"data": 1}, offload=OffloadConfig(experts=0.5)),
    "expert 4, fsdp 2": Plan(mesh={"expert": 4, "fsdp": 2}, offload=HOST),
    "folded": Plan(mesh={"expert": 2, "tensor": 4}, offload=HOST),
    "fsdp": Plan(mesh={"fsdp": 8}, offload=HOST),
}


@functools.cache
def built(name=None):
    """A generator, its parameters and their description."""
    plan = Plan(mesh={"data": 1}) if name is None else PLANS[name]
    size = int(np.prod(list(plan.mesh.values())))
    bound = plan.bind(jax.devices()[:size])
    with colossax.use(bound):
        spec = describe(maker(CONFIG))
    params = fresh_params(CONFIG, spec, bound, jax.random.key(1))
    return Generator(spec, bound, params, slots=48), params, spec


@functools.cache
def wanted(temperature):
    made, *_ = built()
    return made.generate(PROMPT, max_tokens=8, temperature=temperature, seed=3).tokens


def host_bytes(params):
    return sum(x.nbytes for x in jax.tree.leaves(params) if x.sharding.memory_kind != "device")


@pytest.mark.sweep
@pytest.mark.catches("experts-not-left")
@pytest.mark.parametrize("name", PLANS)
def test_tokens_are_those_of_experts_on_the_device(name, devices):
    made, params, _ = built(name)
    for temperature in (0.0, 2.0):
        found = made.generate(PROMPT, max_tokens=8, temperature=temperature, seed=3).tokens
        assert found == wanted(temperature)
    if name not in ("some", "whole layers"):
        assert host_bytes(params) == EXPERT_BYTES


@pytest.mark.catches("experts-not-left")
def test_a_token_fetches_experts_one_by_one():
    bound = PLANS["one"].bind(jax.devices()[:1])
    with colossax.use(bound):
        spec = describe(maker(CONFIG))
    params = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(
            info.shape, np.float32, sharding=param_sharding(bound, "params", info)
        ),
        spec.infos,
    )
    made = Generator(spec, bound, params, slots=48)
    jaxpr = made.program.jitted.trace(*made.arguments).jaxpr
    assert host_arithmetic(jaxpr) == []
    moved = [
        variable.aval.shape
        for scope in scopes(jaxpr)
        for equation in scope.eqns
        if equation.primitive.name == "device_put"
        for variable in equation.invars
        if "host" in str(variable.aval)
    ]
    assert sorted(set(moved)) == sorted({(1, EMBED, MLP), (1, MLP, EMBED)})


@pytest.mark.sweep
@pytest.mark.parametrize("words", [(), ("--plan.offload", "experts=1")])
def test_the_command_line_generates_with_experts_in_host_memory(words, tmp_path, capsys):
    _, params, spec = built()
    slots = [slot_of(info, "model/params") for info in jax.tree.leaves(spec.infos)]
    with Checkpointer(tmp_path) as checkpointer:
        pairs = list(zip(slots, jax.tree.leaves(params), strict=True))
        checkpointer.save(1, pairs, {"model": config_to_json(CONFIG)})
    tokens = ",".join(map(str, PROMPT))
    asked = ["--prompt-tokens", tokens, "--max-tokens", "8", "--temperature", "0", "--devices", "1"]
    assert main(["generate", str(tmp_path), *asked, *words, "--json"]) == 0
    assert str(list(wanted(0.0)))[1:-1] in capsys.readouterr().out
