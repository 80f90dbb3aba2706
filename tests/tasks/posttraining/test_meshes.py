"""Steps of objectives on any mesh, however a batch is cut, are those of one device."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from colossax.config import BatchConfig, LossConfig, OffloadConfig, Plan, Segment, preset
from colossax.models import LlamaConfig, maker
from colossax.nn import AdapterConfig, HeadConfig, with_adapter, with_new_head
from colossax.optim import sgd
from colossax.planner import build_step
from colossax.tasks import (
    PolicyConfig,
    actor_critic_loss,
    critic_options,
    dpo_loss,
    ipo_loss,
    kto_loss,
    kto_options,
    orpo_loss,
    policy_loss,
    preference_loss,
    reference_options,
    simpo_loss,
    soft_target_loss,
    soft_target_options,
)
from tests.cases import quick_first
from tests.oracle import assert_losses_close, assert_trees_close
from tests.tasks.posttraining.bigram import DOCUMENTS, SEQ, UNEVEN, rows_of

CONFIG = LlamaConfig(
    vocab=16, embed=32, layers=2, heads=4, kv_heads=2, mlp=48, max_seq=SEQ, init_std=0.3
)
ADAPTER = AdapterConfig(rank=4, targets="attn/*")
ROWS = 32

PPO = PolicyConfig(divergence=0.1, estimator="k1", normaliser="token", discount=0.9)

OBJECTIVES = {
    "dpo": (dpo_loss(documents=DOCUMENTS), reference_options()),
    "dpo, adapter": (dpo_loss(documents=DOCUMENTS), reference_options()),
    "ipo": (ipo_loss(documents=DOCUMENTS), reference_options()),
    "distill": (soft_target_loss(student="policy", temperature=1.5), soft_target_options()),
    "reward": (preference_loss(documents=DOCUMENTS, margin=0.3), {}),
    "simpo": (simpo_loss(documents=DOCUMENTS), {}),
    "orpo": (orpo_loss(documents=DOCUMENTS), {}),
    "policy": (
        policy_loss(PolicyConfig(divergence=0.1), documents=DOCUMENTS),
        {
            **reference_options(),
            "batch_dims": {
                **reference_options()["batch_dims"],
                **dict.fromkeys(("advantages", "old_logps"), ("batch", "seq")),
            },
        },
    ),
    "ppo": (actor_critic_loss(PPO, documents=DOCUMENTS), critic_options(PPO)),
    "kto": (kto_loss(documents=DOCUMENTS), kto_options(documents=DOCUMENTS)),
}

MESHES = {
    "data": Plan(mesh={"data": 8}),
    "fsdp": preset("zero3", mesh={"fsdp": 8}),
    "chunks": Plan(mesh={"data": 2, "fsdp": 2, "tensor": 2}, loss=LossConfig(vocab_chunks=3)),
    "tensor": Plan(mesh={"tensor": 4, "fsdp": 2}),
    "ring": Plan(mesh={"ring": 2, "fsdp": 4}),
    "ulysses": Plan(mesh={"ulysses": 2, "ring": 2, "data": 2}),
    "2d": Plan(mesh={"row": 2, "col": 2, "data": 2}, tensor_layout="2d"),
    "stage": Plan(mesh={"stage": 2, "fsdp": 2, "tensor": 2}),
    "host": Plan(
        mesh={"fsdp": 4, "tensor": 2},
        offload=OffloadConfig(parameters=1.0, optimizer=1.0),
        segments=(Segment(remat="full"),),
    ),
}
CUTS = (1, 2, 4)
ALL = [
    (name, mesh, cut)
    for name in OBJECTIVES
    for number, mesh in enumerate(MESHES)
    for at, cut in enumerate(CUTS)
    if name in ("dpo", "orpo", "kto") or number % len(CUTS) == at
    if (mesh, name) != ("stage", "ppo")
    if mesh != "host" or name in ("dpo, adapter", "simpo", "orpo", "reward")
]
"""Each objective on each mesh; those that differ by more than a formula however they are cut.

What is updated layer by layer has to learn, so that a frozen model beside it is not in host memory;
stages share the layers of one model that learns.
"""

QUICK = [
    ("dpo", "chunks", 2),
    ("dpo, adapter", "fsdp", 2),
    ("kto", "ring", 4),
    ("orpo", "tensor", 2),
    ("reward", "ring", 2),
]


def batch():
    """Rows of one and of two pairs, of which none has what another has."""
    lengths = [UNEVEN[row * row % 4] for row in range(ROWS)]
    made = rows_of(lengths, seed=3)
    other = rows_of([*reversed(lengths)], seed=4)
    good = np.random.default_rng(2).integers(0, 2, (ROWS, DOCUMENTS)).astype(np.int32)
    return {**made, **{f"mismatched_{name}": x for name, x in other.items()}, "desirable": good}


def makers(name):
    if name == "ppo":
        critic = dataclasses.replace(CONFIG, head=HeadConfig(outputs=1, bias=False))
        frozen = {"reference": maker(CONFIG)}
        return {"policy": maker(CONFIG), "critic": maker(critic), **frozen}
    if name == "dpo, adapter":
        return with_adapter(maker(CONFIG), ADAPTER)
    return {"policy": maker(CONFIG), "teacher" if name == "distill" else "reference": maker(CONFIG)}


def step_of(name, plan):
    loss, options = OBJECTIVES[name]
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    if not options:
        head = HeadConfig(outputs=1, pool="last", bias=False) if name == "reward" else None
        config = dataclasses.replace(CONFIG, head=head)
        make_model = with_new_head(maker(config)) if head else maker(config)
        return build_step(make_model, sgd(0.5), loss, plan, devices=devices)
    return build_step(makers(name), sgd(0.5), loss, plan, devices=devices, **options)


def given(name):
    every, more = batch(), {}
    if name == "policy":
        rng = np.random.default_rng(6)
        draws = rng.normal(size=(2, ROWS, SEQ)).astype(np.float32)
        more = {"advantages": draws[0], "old_logps": -3 + 0.3 * draws[1]}
    if name == "ppo":
        more = {"rewards": np.random.default_rng(6).normal(size=(ROWS, SEQ)).astype(np.float32)}
    return every if name == "kto" else {n: x for n, x in every.items() if n in rows_of([])} | more


def trained(name, plan):
    """Metrics of two steps, and parameters after the first: those of one are its gradient."""
    step = step_of(name, plan)
    state, metrics = step(step.init(), given(name))
    params = jax.tree.map(np.asarray, state["params"])
    _, later = step(state, given(name))
    return params, [{key: float(x) for key, x in one.items()} for one in (metrics, later)]


@functools.cache
def on_one_device(name):
    return trained(name, Plan(mesh={"fsdp": 1}))


@pytest.mark.parametrize(("name", "mesh", "accumulation"), quick_first(ALL, QUICK))
def test_any_mesh_is_one_device(name, mesh, accumulation):
    plan = MESHES[mesh].replace(batch=BatchConfig(accumulation=accumulation))
    params, metrics = trained(name, plan)
    want, wanted = on_one_device(name)
    assert_trees_close(params, want)
    for found, one in zip(metrics, wanted, strict=True):
        assert found.keys() == one.keys()
        assert_losses_close([found["loss"]], [one["loss"]])
        # At first an adapter's policy is its reference: who is ahead is rounding.
        told = found.keys() - ({"accuracy"} if abs(one.get("margin", 1)) < 1e-6 else set())
        for key in told:
            np.testing.assert_allclose(found[key], one[key], rtol=1e-4, atol=2e-5, err_msg=key)


@pytest.mark.catches("adapter-in-its-own-reference")
def test_at_first_the_policy_with_an_adapter_is_its_reference():
    """Exactly: nothing is preferred, and the loss is that of a coin."""
    _, (first, later) = on_one_device("dpo, adapter")
    assert first["margin"] == 0
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert later["loss"] < first["loss"]
