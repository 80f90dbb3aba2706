"""Several named models in one state: each trains as if it were alone."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax import optim
from colossax.config import BatchConfig, OffloadConfig, Plan, Segment, preset
from colossax.errors import CheckpointError, InputError, PlanError
from colossax.inference import Generator, open_checkpoint
from colossax.models import LlamaConfig, config_to_json, maker
from colossax.nn import LayerStack, describe, initialise, param
from colossax.planner import build_step
from colossax.run.checkpointing import RunCheckpoints
from colossax.sharding import use
from colossax.step.saving.records import state_slots
from colossax.tasks import next_token_loss
from tests.fresh import fresh_params
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step.test_step import text_batch

ACTOR = LlamaConfig(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, mlp=48, max_seq=32)
ONE = Plan(mesh={"fsdp": 1})
CUT = preset(
    "zero3",
    mesh={"fsdp": 4, "tensor": 2},
    batch=BatchConfig(accumulation=2),
    segments=(Segment(count=1), Segment(remat="full")),
)


class Layer(nnx.Module):
    """A matrix beside a residual stream."""

    def __init__(self, rngs):
        self.w = param(jax.random.normal(rngs.params(), (16, 16)), ("embed", "mlp"))

    def __call__(self, x, side, state):
        return x + jnp.tanh(x @ self.w), state, {}


class Critic(nnx.Module):
    """A number for each token."""

    def __init__(self, rngs):
        self.table = param(jax.random.normal(rngs.params(), (64, 16)), ("vocab", "embed"))
        self.layers = LayerStack(Layer, 2, rngs=rngs)

    def loss(self, batch):
        values = self.layers(self.table[batch["tokens"]]).carry.sum(axis=-1)
        error = jnp.square(values - batch["targets"]) * batch["weights"]
        return jnp.sum(error), jnp.sum(batch["weights"]), 1.0


MAKERS = {"actor": maker(ACTOR), "critic": Critic}
OPTIMIZERS = {"actor": optim.adamw(1e-2), "critic": optax.sgd(1e-4, momentum=0.9)}


def actor_loss(model, batch):
    return {"actor": next_token_loss()(model, batch)[0]["cross_entropy"]}, {}


def critic_loss(model, batch):
    return {"critic": model.loss(batch)}, {}


def loss(models, batch):
    """The sum of two independent losses."""
    return actor_loss(models.actor, batch)[0] | critic_loss(models["critic"], batch)[0], {}


LOSSES = {"actor": actor_loss, "critic": critic_loss}


def start(step, name=None):
    """Values that the plan does not change, of one of the models or of both."""
    if name is None:
        return {name: start(step, name) for name in MAKERS}
    infos = step.spec.infos
    infos = infos.get(name, infos)
    if name == "actor":
        return fresh_params(ACTOR, SimpleNamespace(infos=infos), step.bound, jax.random.key(7))
    values = initialise(describe(Critic), ONE.bind(jax.devices()[:1]), jax.random.key(7))
    layers = np.asarray(values["layers"]["segments"][0]["w"])
    found = {"table": np.asarray(values["table"]), "layers/w": layers}

    def placed(info, sharding):
        value = found[info.own_path]
        if info.first_layer is not None:
            value = value[info.first_layer :][: info.layer_count]
            value = value if info.stacked else value[0]
        return jax.device_put(np.array(value), sharding)

    shardings = step.shardings["params"]
    return jax.tree.map(placed, infos, shardings.get(name, shardings))


def named(plan, devices, *, optimizer=OPTIMIZERS, **options):
    step = build_step(MAKERS, optimizer, loss, plan, devices=devices, **options)
    return step.init_from(start(step)), step


def after(state, step, count=3):
    """Parameters and optimizer state after some steps, on the host, and the last metrics."""
    metrics = {}
    for seed in range(count):
        state, metrics = step(state, text_batch(seed=seed))
    return jax.tree.map(np.asarray, (state["params"], state["opt_state"])), metrics


@functools.cache
def alone(name):
    one = jax.devices()[:1]
    step = build_step(MAKERS[name], OPTIMIZERS[name], LOSSES[name], ONE, devices=one)
    return after(step.init_from(start(step, name)), step)


@functools.cache
def step_of(kind):
    """A step that several tests share."""
    plan, count = {"one": (ONE, 1), "cut": (CUT, 8)}[kind]
    return build_step(MAKERS, OPTIMIZERS, loss, plan, devices=jax.devices()[:count])


@pytest.mark.catches("optimizer-of-another-model")
def test_two_models_in_one_state_are_to_the_bit_what_each_is_alone():
    """Of models so small that one program computes them as the other does."""
    one = jax.devices()[:1]
    makers = {"a": Critic, "b": lambda rngs: Critic(nnx.Rngs(rngs.params()))}
    optimizers = {"a": optim.adamw(1e-2), "b": optax.sgd(1e-4, momentum=0.9)}

    def together(models, batch):
        return {name: models[name].loss(batch) for name in makers}, {}

    def single(name):
        return lambda model, batch: ({name: model.loss(batch)}, {})

    step = build_step(makers, optimizers, together, ONE, devices=one)
    state = step.init(3)
    begun = jax.tree.map(np.asarray, state["params"])
    (params, opt_state), metrics = after(state, step)
    for name in makers:
        other = build_step(makers[name], optimizers[name], single(name), ONE, devices=one)
        own = jax.tree.map(jnp.array, begun[name])
        want, last = after(other.init_from(own), other)
        jax.tree.map(np.testing.assert_array_equal, (params[name], opt_state[name]), want)
        assert metrics[name] == last[name]


@pytest.mark.parametrize("kind", ["one", "cut"])
def test_they_learn_what_each_learns_alone_on_any_mesh(kind):
    step = step_of(kind)
    (params, _), metrics = after(step.init_from(start(step)), step)
    for name in MAKERS:
        assert_losses_close(metrics[name], alone(name)[1][name])
    assert_trees_close(params["critic"]["table"], alone("critic")[0][0]["table"])
    assert_losses_close(metrics["loss"], sum(float(metrics[name]) for name in MAKERS))
    norms = [alone(name)[1]["grad_norm"] for name in MAKERS]
    assert_losses_close(metrics["grad_norm"], np.linalg.norm(norms))


def test_paths_begin_with_the_name():
    infos = jax.tree.leaves(step_of("cut").spec.infos)
    assert {info.model for info in infos} == set(MAKERS)
    assert all(info.path == f"{info.model}/{info.own_path}" for info in infos)
    segments = {info.segment for info in infos if info.segment}
    assert segments == {(f"{name}/layers", i) for name in MAKERS for i in (0, 1)}


def test_what_a_model_begins_with_is_decided_by_its_name():
    bound = ONE.bind(jax.devices()[:1])
    found = [
        initialise(describe(dict.fromkeys(names, Critic)), bound, jax.random.key(3))
        for names in (["actor"], ["critic", "actor"])
    ]
    one, both = [{name: own["table"].tolist() for name, own in each.items()} for each in found]
    assert one["actor"] == both["actor"] != both["critic"]


def test_one_of_them_can_be_frozen_and_needs_no_optimizer():
    state, step = named(
        ONE,
        jax.devices()[:1],
        optimizer={"critic": OPTIMIZERS["critic"]},
        trainable=lambda info: info.model == "critic",
    )
    before = jax.tree.map(np.asarray, state["params"]["actor"])
    (params, opt_state), _ = after(state, step)
    jax.tree.map(np.testing.assert_array_equal, params["actor"], before)
    assert set(opt_state) == {"critic"}
    assert_trees_close(params["critic"], alone("critic")[0][0], tolerance=1e-6)


@pytest.mark.catches("spec-of-another-model")
def test_one_of_them_is_taken_out_of_the_state():
    """As if described alone; what it is given at random is what the state begins with."""
    step = step_of("cut")
    for name in MAKERS:
        with use(step.bound):
            own, want = step.spec_of(name), describe(MAKERS[name])
        assert own.infos == want.infos
        found = initialise(own, step.bound, jax.random.fold_in(jax.random.key(3), 0))
        jax.tree.map(np.testing.assert_array_equal, found, step.fresh_params(3)[name])
    with pytest.raises(InputError, match="model 'judge': .*; the state holds 'actor', 'critic'"):
        step.spec_of("judge")
    alone = build_step(Critic, optax.sgd(1.0), critic_loss, ONE, devices=jax.devices()[:1])
    with pytest.raises(InputError, match="the state holds one model without a name"):
        alone.spec_of("critic")


def test_one_of_them_generates_between_steps_by_one_program():
    step = step_of("one")
    with use(step.bound):
        spec = describe(maker(ACTOR))
    state, generator, prompt = step.init_from(start(step)), None, [3, 1, 4]
    for seed in range(2):
        state, _ = step(state, text_batch(seed=seed))
        own = state["params"]["actor"]
        if generator is None:
            generator = Generator(step.spec_of("actor"), step.bound, own)
        told = generator.with_params(own).generate(prompt, max_tokens=6)
        assert told == Generator(spec, step.bound, own).generate(prompt, max_tokens=6)
    assert generator.program.jitted._cache_size() == 1


def test_clipping_is_by_the_norm_of_all():
    """Of two critics under plain SGD, whose change is the clipped gradient."""

    def both(models, batch):
        return {"a": models.a.loss(batch), "b": models.b.loss(batch)}, {}

    moved, norm = [], 0.0
    for clip in (None, 0.5):
        step = build_step(
            {"a": Critic, "b": Critic},
            {"a": optax.sgd(1.0), "b": optax.sgd(1.0)},
            both,
            ONE,
            devices=jax.devices()[:1],
            clip_norm=clip,
        )
        state = step.init()
        before = jax.tree.map(np.asarray, state["params"])
        state, metrics = step(state, text_batch())
        norm = float(metrics["grad_norm"])
        moved.append(jax.tree.map(lambda a, b: a - np.asarray(b), before, state["params"]))
    assert norm > 0.5
    assert_trees_close(moved[1], jax.tree.map(lambda x: x * 0.5 / norm, moved[0]), tolerance=1e-4)


@pytest.mark.catches("record-of-another-model")
def test_a_checkpoint_of_both_goes_on_on_another_mesh_and_serves_one(tmp_path):
    step, other = step_of("one"), step_of("cut")
    state, _ = step(step.init_from(start(step)), text_batch())
    problems = []
    documents = {"models": {"actor": config_to_json(ACTOR)}}
    options = {"keep": 1, "documents": documents, "report": problems.append}
    run = RunCheckpoints(tmp_path, step, **options)
    run.save(state, 1)
    run.finish()
    assert not problems
    restored = RunCheckpoints(tmp_path, other, **options).restore(1)
    own = np.asarray(restored["params"]["actor"]["head"]["w"])
    _, want = step(state, text_batch(seed=1))
    _, got = other(restored, text_batch(seed=1))
    assert_losses_close(got["loss"], want["loss"])
    assert_losses_close(got["grad_norm"], want["grad_norm"])

    model = open_checkpoint(tmp_path, "actor").load(ONE, jax.devices()[:1])
    np.testing.assert_array_equal(model.params["head"]["w"], own)
    for name in ("critic", "model"):
        with pytest.raises(CheckpointError, match=f"names no model '{name}'; it has 'actor'"):
            open_checkpoint(tmp_path, name)


@pytest.mark.catches("record-of-another-model")
def test_records_of_a_named_model_are_those_of_one_that_is_alone():
    """But for the name itself; a model alone is called `model`, as it always was."""
    names = {slot.name for slot in jax.tree.leaves(state_slots(step_of("cut")))}
    found = set()
    for name in MAKERS:
        one = build_step(MAKERS[name], OPTIMIZERS[name], LOSSES[name], CUT)
        for record in {slot.name for slot in jax.tree.leaves(state_slots(one))}:
            kept = record.startswith(("model/params/", "model/optimizer/"))
            found.add(record.replace("model/", f"{name}/", 1) if kept else record)
    assert found == names
    assert {"actor/optimizer/0/mu/layers/attn/q/w", "critic/params/table"} < names


def test_one_optimizer_may_serve_all_layer_by_layer():
    """In host memory too; two optimizers are refused there."""
    plan = ONE.replace(offload=OffloadConfig(parameters=1.0, optimizer=1.0))
    with pytest.raises(PlanError, match="models with optimizers of their own are not; give all"):
        build_step(MAKERS, OPTIMIZERS, loss, plan, devices=jax.devices()[:1])
    step = build_step(MAKERS, optim.adamw(1e-2), loss, plan, devices=jax.devices()[:1])
    assert set(step.streaming.parts) == {("actor/layers", 0), ("critic/layers", 0)}
    assert set(step.abstract["opt_state"][0].mu) == set(MAKERS)
    names = {slot.name for slot in jax.tree.leaves(state_slots(step))}
    assert {"actor/optimizer/0/mu/layers/attn/q/w", "critic/optimizer/0/nu/table"} < names


@pytest.mark.parametrize(
    ("makers", "optimizer", "message"),
    [
        (MAKERS, {**OPTIMIZERS, "judge": optax.sgd(1.0)}, "it names 'judge', and there are 'act"),
        (MAKERS, {"actor": optax.sgd(1.0)}, "model 'critic' has none and learns; give it one"),
        (Critic, OPTIMIZERS, "it names 'actor', and there are 'layers', 'table'"),
        ({}, optax.sgd(1.0), "the mapping is empty"),
        ({"a b": Critic}, optax.sgd(1.0), "'a b' cannot be a model's name"),
        ({"segments": Critic}, optax.sgd(1.0), "'segments' cannot be a model's name"),
        ({"train": Critic}, optax.sgd(1.0), "'train' cannot be a model's name"),
    ],
)
def test_names_that_do_not_fit_are_refused(makers, optimizer, message):
    with pytest.raises(InputError, match=message):
        build_step(makers, optimizer, loss, ONE, devices=jax.devices()[:1])
