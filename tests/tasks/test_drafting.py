"""A drafter that learns beside its frozen model: its loss, what is kept, and what is accepted."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.checkpoint import find_checkpoint
from colossax.config import BatchConfig, Plan, preset
from colossax.errors import CheckpointError, InputError, PlanError
from colossax.inference import open_checkpoint, open_drafter
from colossax.models import Gemma2Config, LlamaConfig, maker
from colossax.nn import Decoder, Drafter, DrafterConfig, as_target, drafter_maker
from colossax.planner import build_step
from colossax.recipes import recipe
from colossax.step.saving.records import StateRecords
from colossax.tasks import task_of
from colossax.tasks.drafting.acceptance import Acceptance, draft_lengths, told_right, walk
from colossax.tasks.drafting.loss import drafting_loss, drafting_options
from tests.launching import write_text
from tests.oracle import assert_trees_close
from tests.step.test_step import text_batch
from tests.tasks.small_text import changed, ran

pytestmark = pytest.mark.slow

TARGET = LlamaConfig(
    vocab=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, max_seq=32, init_std=0.4
)
HOW = DrafterConfig(layers=1, block=3, text=0.25)
ONE = Plan(mesh={"fsdp": 1})
ALL, OTHER = Plan(mesh={"fsdp": 8}), Plan(mesh={"data": 4, "tensor": 2})
MESHES = {
    "split": preset("zero3", mesh={"fsdp": 2, "tensor": 2}, batch=BatchConfig(accumulation=2)),
    "ring": Plan(mesh={"data": 2, "ring": 2}),
}


def step_of(plan=ONE, how=HOW):
    models = {
        "target": as_target(maker(TARGET)),
        "drafter": drafter_maker(how, TARGET.decoder()),
    }
    devices = jax.devices()[: int(np.prod(list(plan.mesh.values())))]
    options = drafting_options(how)
    return build_step(models, optax.sgd(1.0), drafting_loss(how), plan, devices=devices, **options)


@pytest.fixture(scope="module")
def alone():
    """Step, first state, and the state and metrics after a step, on one device."""
    step = step_of()
    first = jax.tree.map(np.asarray, step.init())
    state, metrics = step(step.init(), text_batch())
    return step, first, jax.tree.map(np.asarray, state), metrics


def by_hand(models, batch, text):
    """The loss from whole logits, blocks beginning at each row's first token."""
    target, drafter = models["target"], models["drafter"]
    rows = {name: batch[name] for name in ("positions", "segments")}
    hidden, keys = target.hidden_and_keys(batch["tokens"], **rows)
    offsets = jnp.zeros(len(batch["tokens"]), jnp.int32)
    own = drafter.hidden(target.embedded(batch["tokens"]), keys, offsets, **rows)
    told, own = (jax.nn.log_softmax(target.logits(x), axis=-1) for x in (hidden, own))
    apart = jnp.sum(jnp.exp(told) * (told - own), axis=-1)
    error = -jnp.take_along_axis(own, batch["targets"][..., None], axis=-1)[..., 0]
    weights = batch["weights"]
    return jnp.sum(weights * ((1 - text) * apart + text * error)) / jnp.sum(weights)


@pytest.mark.catches("drafting-loss-without-target")
def test_the_loss_is_divergence_and_cross_entropy_by_hand(alone):
    step, first, _, _ = alone
    batch = {name: jnp.asarray(x) for name, x in text_batch().items()}
    totals = step.evaluate(step.init(), batch)
    means = {name: total / weight for name, (total, weight) in totals.items()}
    found = 0.75 * means["divergence"] + 0.25 * means["cross_entropy"]
    models = step.spec.merge(first["params"])
    np.testing.assert_allclose(found, jax.jit(by_hand)(models, batch, 0.25), rtol=1e-5)


@pytest.mark.catches("target-learns")
@pytest.mark.catches("target-stored-again")
def test_the_target_stays_as_it_is_and_has_no_moments(alone):
    step, first, state, _ = alone
    assert_trees_close(state["params"]["target"], first["params"]["target"], tolerance=0)
    moved = jax.tree.map(lambda x, y: np.any(x != y), state["params"], first["params"])
    assert all(jax.tree.leaves(moved["drafter"]))
    records = [slot.name for slot, _ in StateRecords(step).pairs(step.abstract)]
    assert records and not [name for name in records if "target" in name]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_is_the_same_on_every_mesh(mesh, alone):
    """Where blocks begin is drawn row by row, whoever has the row."""
    _, _, want, metrics = alone
    step = step_of(MESHES[mesh])
    state, found = step(step.init(), text_batch())
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-5)
    assert_trees_close(
        jax.tree.map(np.asarray, state["params"]["drafter"]),
        want["params"]["drafter"],
    )


@pytest.mark.catches("draft-of-another-block")
def test_lengths_are_those_of_drafting_token_by_token():
    """Each next token from all that was drafted before it, the target's keys up to the first."""
    config = dataclasses.replace(TARGET.decoder(), vocab=3)
    target = Decoder(config, rngs=nnx.Rngs(0))
    drafter = Drafter(HOW, config, rngs=nnx.Rngs(1))
    models, block, length = {"target": target, "drafter": drafter}, HOW.block, 14
    rows = jax.random.randint(jax.random.key(3), (3, length), 0, config.vocab)

    @jax.jit
    def likeliest(text, seen, at, offset):
        _, keys = target.hidden_and_keys(seen)
        hidden = drafter.hidden(target.embedded(text), keys, jnp.full(3, offset))
        return jnp.argmax(target.logits(hidden[:, at]), axis=-1)

    want = np.full((3, length), -1)
    for n in range(length - block):
        text, held = np.array(rows), np.ones(3, bool)
        text[:, n + 1 :] = 0
        seen, want[:, n] = text.copy(), 0
        for at in range(n, n + block):
            text[:, at + 1] = likeliest(jnp.asarray(text), jnp.asarray(seen), at, -n % block)
            held &= text[:, at + 1] == np.asarray(rows)[:, at + 1]
            want[:, n] += held
    right = jax.jit(lambda rows: told_right(models, rows, block, 2))(rows)
    found = draft_lengths(np.asarray(right), block)
    np.testing.assert_array_equal(found, want)
    assert set(found.ravel()) == {-1, 0, 1, 2, 3}


@pytest.mark.catches("walk-without-bonus")
def test_a_draft_begins_where_the_target_took_the_last_one_to():
    lengths = np.asarray([[9, 9, 2, 9, 9, 0, 3, 9, 9, 9, 1, 9, -1, -1]])
    found = walk(lengths, np.asarray([2]), np.asarray([14]), 3)
    np.testing.assert_array_equal(found, [2, 0, 3, 1])
    told = Acceptance(accepted=found, block=3)
    assert told.mean == 6 / 4
    assert told.rate == 6 / (3 + 1 + 3 + 2)
    assert told.by_place == [3 / 4, 2 / 3, 1 / 2]
    none = walk(lengths, np.asarray([12]), np.asarray([14]), 3)
    assert np.isnan(Acceptance(accepted=none, block=3).mean)


def small(name, folder, **changes):
    """A recipe on little text, its model tiny."""
    model = LlamaConfig(
        vocab=300, embed=16, layers=1, heads=2, kv_heads=2, mlp=24, max_seq=32, init_std=0.2
    )
    sizes = {"seq_len": 24, "global_batch": 8, "tokenizer_vocab": 300, "validation_batches": 1}
    config = changed(recipe(name), "data", path=str(folder / "text"), **sizes)
    config = config.replace(model=model, plan=ALL, steps=2, validate_every=0, checkpoint_every=2)
    return config.replace(sample=recipe("finetune").sample, **changes)


def unjudged(config):
    """The task without what is measured of a state."""
    none = {"evaluators": {}, "conclusion": lambda final: (), "complete": None}
    return dataclasses.replace(task_of(config), **none)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A target, and a drafter of it after two steps; with what its run said."""
    folder = tmp_path_factory.mktemp("drafting")
    write_text(folder / "text")
    for number in range(2):
        config = small("llama_tiny", folder, seed=number)
        ran(config, folder / f"target-{number}", task=unjudged(config))
    config = small("glide_tiny", folder, init=str(folder / "target-0"))
    return folder, config, ran(config, folder / "drafter")


def test_a_run_tells_what_is_accepted_of_text_held_out(trained):
    _, config, final = trained
    assert 0 <= final["accepted"] <= config.drafter.block
    assert 0 <= final["acceptance"] <= 1 and final["validation_loss"] > 0
    assert {f"acceptance_{at}" for at in range(1, 5)} <= final.keys()


@pytest.mark.catches("drafter-names-no-target")
@pytest.mark.catches("drafter-beside-any")
def test_a_checkpoint_holds_the_drafter_alone_and_is_read_beside_its_target(trained, devices):
    folder, config, _ = trained
    records = find_checkpoint(folder / "drafter").records()
    assert {name.split("/")[0] for name in records if "/params/" in name} == {"drafter"}
    plan = Plan(mesh={"fsdp": 2})
    target = open_checkpoint(folder / "target-0").load(plan, devices[:2])
    loaded = open_drafter(folder / "drafter").beside(target)
    assert loaded.config == config.drafter
    assert isinstance(loaded.spec.merge(loaded.params), Drafter)
    with pytest.raises(CheckpointError, match="target-1.*whose parameters differ; give that model"):
        open_drafter(folder / "drafter").beside(
            open_checkpoint(folder / "target-1").load(plan, devices[:2])
        )
    with pytest.raises(CheckpointError, match="holds no drafter; give one that colossax train"):
        open_drafter(folder / "target-0")
    with pytest.raises(CheckpointError, match="holds a drafter, which continues no text by itself"):
        open_checkpoint(folder / "drafter")


@pytest.mark.sweep
def test_a_run_goes_on_elsewhere_as_if_nobody_had_touched_it(trained):
    folder, config, _ = trained
    config = changed(config.replace(steps=4), "optimizer", schedule_steps=4)
    task = unjudged(config)
    ran(config, folder / "whole", task=task)
    ran(config.replace(steps=2), folder / "parts", task=task)
    ran(config.replace(plan=OTHER), folder / "parts", resume=True, task=task)

    def losses(name):
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]

    assert len(losses("whole")) == 4
    np.testing.assert_allclose(losses("parts"), losses("whole"), rtol=2e-5)


BESIDE = {"adapter.rank": ("adapter", {"rank": 2}), "sample.prompt": ("sample", {"prompt": "a"})}


@pytest.mark.parametrize("name", BESIDE)
def test_what_does_not_go_with_a_drafter_is_refused(name):
    part, fields = BESIDE[name]
    with pytest.raises(InputError, match=f"drafter.layers: found 1 beside {name}; .*leave the"):
        changed(recipe("glide_tiny"), part, **fields)


def test_targets_and_plans_that_have_no_drafters_are_refused(tmp_path):
    glide = recipe("glide_tiny")
    with pytest.raises(PlanError, match="plan.mesh: found stage=2, .*give data, fsdp, tensor"):
        glide.replace(plan=Plan(mesh={"stage": 2}))
    with pytest.raises(InputError, match="drafter.layers: the target is a T5, .*so give one"):
        glide.replace(model=recipe("t5_stdlib").model)
    capped = Gemma2Config(vocab=64, embed=16, layers=2, heads=2, kv_heads=2, head_dim=8, mlp=16)
    with pytest.raises(InputError, match="drafter.text: found 0, .*give drafter.text 1"):
        glide.replace(model=dataclasses.replace(capped, max_seq=256))
    write_text(tmp_path / "text")
    with pytest.raises(InputError, match="drafter: it learns beside a model .*with --init"):
        ran(small("glide_tiny", tmp_path), tmp_path / "run")
