"""Slips of a newcomer in Python: each is answered by one sentence with its culprit and a remedy.

Those of `boost`'s first arguments are in tests/planner/test_arguments.py, those of an optimizer in
tests/step/test_optax.py, of names of dims in tests/nn/test_naming.py, of a plan's JSON in
tests/config/test_plan.py, those of the command line in tests/cli/test_mistakes.py.
"""

import dataclasses
import functools
import re
from types import SimpleNamespace

import flax.linen
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from flax import nnx

import colossax
from colossax import Plan, boost, build_step, fit, next_token_loss, preset
from colossax.config import BatchConfig
from colossax.errors import CheckpointError, InputError, PlanError
from colossax.models import LlamaConfig, maker
from colossax.nn import param
from colossax.run import EarlyStopping
from tests.fresh import fresh_state

DIMS = {"x": ("batch", None), "y": ("batch",)}
LLAMA = LlamaConfig(vocab=64, embed=32, layers=1, heads=4, kv_heads=2, mlp=48, max_seq=16)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 16, rngs=rngs)
        self.b = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.b(jax.nn.relu(self.a(x)))


class Narrow(Net):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 4, rngs=rngs)
        self.b = nnx.Linear(4, 8, rngs=rngs)


class Double(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 8, param_dtype=jnp.float64, rngs=rngs)


class ByName(nnx.Module):
    def __init__(self, width, *, rngs):
        self.a = nnx.Linear(8, width, rngs=rngs)


class Empty(nnx.Module):
    def __init__(self, rngs):
        pass


class Misnamed(nnx.Module):
    def __init__(self, rngs):
        self.w = param(jnp.ones((8, 8)), ("embd", "mlp"))


class OfLinen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(8)(x)


def squares(model, batch):
    error = jnp.square(model(batch["x"]).sum(-1) - batch["y"])
    return {"error": (jnp.sum(error), jnp.float32(error.size), 1.0)}, {}


def branching(model, batch):
    value = jnp.mean(model(batch["x"]))
    return value if value > 0 else -value


def rows(count=8, width=8):
    return {"x": np.ones((count, width), np.float32), "y": np.zeros(count, np.float32)}


def text(**changes):
    tokens = np.arange(8 * 16, dtype=np.int32).reshape(8, 16) % 64
    whole = {"tokens": tokens, "targets": tokens, "weights": np.ones((8, 16), np.float32)}
    return {name: x for name, x in {**whole, **changes}.items() if x is not None}


def at_first(value, dtype=np.int32):
    """Tokens of which the first is this."""
    tokens = text()["tokens"].astype(dtype)
    tokens[0, 0] = value
    return tokens


def made(make_model=Net, optimizer=None, loss=squares, plan=None, *, devices=1, **options):
    """A step, of one device unless all are asked for (None)."""
    return build_step(
        make_model,
        optax.sgd(0.1) if optimizer is None else optimizer,
        loss,
        Plan() if plan is None else plan,
        devices=jax.devices()[:devices] if isinstance(devices, int) else devices,
        **{"batch_dims": DIMS, **options},
    )


@pytest.fixture(scope="module")
def here():
    """Steps with their states, and calls that come as far as the loss or the batch."""
    step, language = made(), made(maker(LLAMA), loss=next_token_loss())
    adam = made(optimizer=optax.adamw(0.1))

    def traced(loss, optimizer=None, batch=None, **more):
        step = made(loss=loss, optimizer=optimizer, **more)
        return jax.eval_shape(step.pure, step.abstract, step.place(batch or rows()))

    return SimpleNamespace(
        step=step,
        state=step.init(),
        adam=adam,
        adam_state=adam.init(),
        traced=traced,
        told=functools.partial(language.evaluate, fresh_state(LLAMA, language)),
    )


BOOST = {
    "model needs more than rngs": (
        lambda c: made(nnx.Linear),
        "called with one argument, rngs",
        "Linear takes in_features",
    ),
    "rngs by name alone": (lambda c: made(ByName), "ByName takes width, rngs=", "lambda rngs:"),
    "factory takes no rngs": (
        lambda c: made(lambda: Net(nnx.Rngs(0))),
        "takes none",
        "lambda rngs:",
    ),
    "factory returns nothing": (
        lambda c: made(lambda rngs: None),
        "returned a NoneType",
        "nnx.Module",
    ),
    "factory returns arrays": (
        lambda c: made(lambda rngs: {"w": jnp.ones(3)}),
        "returned a dict",
        "return an nnx.Module",
    ),
    "model without parameters": (lambda c: made(Empty), "Empty holds no parameters", "nnx.Linear("),
    "a module of Linen": (lambda c: made(OfLinen()), "OfLinen of flax.linen", "flax.nnx"),
    "a configuration as the model": (
        lambda c: made(LLAMA),
        "is a LlamaConfig",
        "colossax.models.maker(config)",
    ),
    "float64 parameters": (lambda c: made(Double), "asks for float64", "param_dtype=jnp.float32"),
    "optimizer not called": (
        lambda c: made(optimizer=optax.adamw),
        "the function optax.adamw",
        "optax.adamw(0.001)",
    ),
    "a schedule as the optimizer": (
        lambda c: made(optimizer=optax.constant_schedule(0.1)),
        "the function optax.constant_schedule",
        "optax.adamw(0.001)",
    ),
    "optimizer from dims is none": (
        lambda c: made(optimizer=lambda dims: 0.1),
        "gave a float",
        "Optax transformation",
    ),
    "loss of other arguments": (
        lambda c: made(loss=lambda model, x, y: 0.0),
        "takes model, x, y",
        "lambda model, batch:",
    ),
    "loss of a batch alone": (
        lambda c: made(loss=lambda batch: 0.0),
        "takes batch",
        "model, batch",
    ),
    "loss not made yet": (
        lambda c: made(loss=next_token_loss),
        "next_token_loss takes z_loss",
        "call it first",
    ),
    "devices by name": (lambda c: made(devices=["cpu"]), "devices is ['cpu']", "jax.devices()[:1]"),
    "one device, not a list": (
        lambda c: made(devices=jax.devices()[0]),
        "devices is CpuDevice",
        "jax.devices()[:1]",
    ),
    "no devices": (lambda c: made(devices=0), "devices is []", "leave it out"),
    "seed is no whole number": (
        lambda c: boost(Net, optax.sgd(0.1), squares, Plan(), seed=1.5),
        "seed is 1.5",
        "seed=0",
    ),
    "option misspelt": (lambda c: made(batchdims={}), "'batchdims'", "'batch_dims'"),
    "option of another library": (
        lambda c: made(max_grad_norm=1.0),
        "'max_grad_norm'",
        "'clip_norm'",
    ),
    "clip below 0": (lambda c: made(clip_norm=-1.0), "clip_norm: found -1.0", "above 0"),
    "clip as text": (
        lambda c: made(clip_norm="1"),
        "clip_norm: expected float, found '1'",
        "give a number",
    ),
    "trainable is a list": (
        lambda c: made(trainable=["a"]),
        "trainable: found ['a']",
        "info.path.startswith",
    ),
    "nothing learns": (
        lambda c: made(trainable=lambda info: False),
        "no parameter is left",
        "let the",
    ),
    "dims of an array as text": (
        lambda c: made(batch_dims={"x": "batch"}),
        "'x' is given 'batch'",
        "('batch', None)",
    ),
    "a dim misspelt": (
        lambda c: made(Misnamed, plan=Plan(mesh={"fsdp": 8}), devices=None),
        "no rule of the plan knows dim 'embd'",
        "'embed'",
    ),
}

PLAN = {
    "field misspelt": (lambda c: Plan(meshes={"fsdp": 8}), "no field is called 'meshes'", "'mesh'"),
    "remat of the plan": (lambda c: preset("zero3", remat="full"), "'remat'", "'segments'"),
    "axis of another library": (lambda c: Plan(mesh={"tp": 8}), "'tp'", "'tensor'"),
    "preset named after an axis": (lambda c: preset("fsdp"), "'fsdp'", "'zero3'"),
    "mesh as sizes": (lambda c: Plan(mesh=(4, 2)), "found (4, 2)", "axis=size"),
    "mesh larger than the machine": (
        lambda c: made(plan=Plan(mesh={"fsdp": 16}), devices=None),
        "fsdp=16",
        "product is 8",
    ),
    "mesh does not multiply": (
        lambda c: made(plan=Plan(mesh={"fsdp": 3}), devices=None),
        "there are 8 devices",
        "to -1",
    ),
    "heads not divided": (
        lambda c: made(maker(LLAMA), plan=preset("megatron", mesh={"tensor": 8}), devices=None),
        "dim 'heads' has size 4",
        "divides 4",
    ),
    "precision by its short name": (
        lambda c: Plan(precision="bf16"),
        "precision: expected Precision",
        "Precision(",
    ),
    "JSON misspelt": (lambda c: Plan.from_json('{"mesch": {}}'), "'mesch'", "'mesh'"),
    "a preset's name in force": (
        lambda c: colossax.use("zero3").__enter__(),
        "found 'zero3'",
        "colossax.preset('zero3')",
    ),
}

STEP = {
    "batch before state": (lambda c: c.step(rows(), c.state), "but 'x', 'y'", "state, metrics ="),
    "metrics not taken off": (
        lambda c: c.step((c.state, {}), rows()),
        "the state is a tuple",
        "take them apart",
    ),
    "parameters as the state": (
        lambda c: c.step(c.state["params"], rows()),
        "no 'opt_state', but 'a', 'b'",
        "whole state",
    ),
    "no state": (lambda c: c.step(None, rows()), "is a NoneType", "state, metrics = step"),
    "state of another optimizer": (
        lambda c: c.step(c.adam_state, rows()),
        "'opt_state/0/count' is []",
        "step.restore",
    ),
    "state of another model": (
        lambda c: c.step({**c.state, "params": made(Narrow).abstract["params"]}, rows()),
        "'params/a/bias' is [4], and [16]",
        "another model",
    ),
    "state of another mesh": (
        lambda c: made(plan=Plan(mesh={"fsdp": 8}), devices=None)(
            jax.device_put(c.state, jax.devices()[0]), rows()
        ),
        "the state lies on 1 devices (0)",
        "jax.device_put(state, step.shardings)",
    ),
    "model of parameters": (
        lambda c: c.step.model(c.state["params"]),
        "no 'opt_state'",
        "whole state",
    ),
    "loss of no form": (
        lambda c: c.traced(lambda m, b: m(b["x"])),
        "array of shape [8, 8]",
        "totals",
    ),
    "loss with an aux": (
        lambda c: c.traced(lambda m, b: (jnp.sum(m(b["x"])), {})),
        "(an array of one number, a dict)",
        "return totals",
    ),
    "term without coefficient": (
        lambda c: c.traced(lambda m, b: ({"e": (jnp.sum(m(b["x"])), 8.0)}, {})),
        "'e' is (an array of one number, 8.0)",
        "(total, weight, coefficient)",
    ),
    "a mean where microbatches are": (
        lambda c: c.traced(
            lambda m, b: jnp.mean(m(b["x"])), plan=Plan(batch=BatchConfig(accumulation=2))
        ),
        "it is one number",
        "(sum, count, 1.0)",
    ),
    "if on an array": (lambda c: c.traced(branching), "test_mistakes.py:", "jnp.where("),
    "float of an array": (
        lambda c: c.traced(lambda m, b: float(jnp.sum(m(b["x"])))),
        "loss: ",
        "float",
    ),
    "a mask as an index": (
        lambda c: c.traced(lambda m, b: jnp.sum(m(b["x"])[b["x"] > 0])),
        "loss: ",
        "jnp.where(",
    ),
}

DATA = {
    "an array is missing": (
        lambda c: c.traced(squares, batch={"x": rows()["x"]}),
        "asks for 'y'",
        "add it to the batch",
    ),
    "rows of several lengths": (
        lambda c: c.step(c.state, {**rows(), "x": [[1.0], [1.0, 2.0]]}),
        "'x': its rows differ",
        "pad",
    ),
    "text as numbers": (
        lambda c: c.step(c.state, {**rows(), "x": np.array(["a"] * 8)}),
        "array of <U1",
        "of numbers",
    ),
    "objects as numbers": (
        lambda c: c.step(c.state, {**rows(), "z": np.array([{}] * 8)}),
        "array of object",
        "of numbers",
    ),
    "None as an array": (
        lambda c: c.step(c.state, {**rows(), "z": None}),
        "'z': found a NoneType",
        "array",
    ),
    "mappings within a batch": (
        lambda c: c.step(c.state, {"x": rows()}),
        "'x': found a dict",
        "a name of its own",
    ),
    "a batch of nothing": (lambda c: c.step(c.state, {}), "holds no arrays", "by name"),
    "a batch of no rows": (
        lambda c: c.step(c.state, rows(0)),
        "'x': it has no rows",
        "one or more",
    ),
    "rows not divided": (
        lambda c: made(plan=Plan(batch=BatchConfig(accumulation=3))).place(rows()),
        "8 rows cannot be cut into 3 microbatches;",
        "multiple of 3",
    ),
    "tokens below 0": (
        lambda c: c.told(text(tokens=at_first(-5))),
        "'tokens': -5 at [0, 0]",
        "0 to 63",
    ),
    "tokens beyond the vocabulary": (
        lambda c: c.told(text(tokens=at_first(64))),
        "'tokens': 64 at [0, 0]",
        "0 to 63",
    ),
    "targets left out by -100": (
        lambda c: c.told(text(targets=at_first(-100))),
        "'targets': -100",
        "'weights' 0",
    ),
    "tokens in float": (
        lambda c: c.told(text(tokens=at_first(1, np.float32))),
        "found float32[8, 16]",
        "whole numbers",
    ),
    "one row without its batch": (
        lambda c: c.told({name: x[0] for name, x in text().items()}),
        "int32[16]",
        "[batch, seq]",
    ),
    "targets of another length": (
        lambda c: c.told(text(targets=text()["targets"][:, :8])),
        "[8, 8]",
        "tokens of [8, 16]",
    ),
    "no targets": (
        lambda c: c.told(text(targets=None)),
        "asks for 'targets'",
        "add it to the batch",
    ),
    "no weights": (
        lambda c: c.told(text(weights=None)),
        "asks for 'weights'",
        "add it to the batch",
    ),
    "rows beyond the context": (
        lambda c: c.told({name: np.tile(x, 2) for name, x in text().items()}),
        "32 is above",
        "max_seq",
    ),
}

EVALUATE = {
    "nothing to evaluate": (lambda c: c.step.evaluate(c.state, {}), "holds no arrays", "by name"),
    "no rows to evaluate": (
        lambda c: c.step.evaluate(c.state, rows(0)),
        "it has no rows",
        "one or more",
    ),
    "batch before state in evaluate": (
        lambda c: c.step.evaluate(rows(), c.state),
        "but 'x', 'y'",
        "before the batch",
    ),
    "an array is missing in evaluate": (
        lambda c: c.step.evaluate(c.state, {"x": rows()["x"]}),
        "asks for 'y'",
        "add it to the batch",
    ),
}

FIT = {
    "step before state": (
        lambda c: fit(c.step, c.state, [rows()], steps=1),
        "first two",
        "fit(state",
    ),
    "steps in float": (
        lambda c: fit(c.state, c.step, [rows()], steps=1e3),
        "steps: expected int, found 1000.0",
        "whole",
    ),
    "steps as text": (
        lambda c: fit(c.state, c.step, [rows()], steps="3"),
        "steps: expected int, found '3'",
        "whole",
    ),
    "one batch as the batches": (
        lambda c: fit(c.state, c.step, rows(), steps=1),
        "are one batch",
        "as [batch]",
    ),
    "no batches": (
        lambda c: fit(c.state, c.step, [], steps=1),
        "batches are empty",
        "give an iterable",
    ),
    "callback not built": (
        lambda c: fit(c.state, c.step, [rows()], steps=1, callbacks=[EarlyStopping]),
        "EarlyStopping",
        "callbacks=[EarlyStopping(...)]",
    ),
    "one callback, not a list": (
        lambda c: fit(c.state, c.step, [rows()], steps=1, callbacks=print),
        "hold <built-in",
        "a list of",
    ),
    "tracker as text": (
        lambda c: fit(c.state, c.step, [rows()], steps=1, trackers="wandb"),
        "'wandb'",
        "['wandb']",
    ),
    "tracker misspelt": (
        lambda c: fit(c.state, c.step, [rows()], steps=1, trackers=["tensorbord"]),
        "'tensorbord'",
        "'tensorboard'",
    ),
}

CATCHES = {
    "float64 parameters": pytest.mark.catches("double-parameters"),
    "optimizer not called": pytest.mark.catches("optimizer-uncalled"),
    "loss of other arguments": pytest.mark.catches("arguments-of-a-function"),
    "option misspelt": pytest.mark.catches("option-unknown"),
    "no devices": pytest.mark.catches("devices-unchecked"),
    "field misspelt": pytest.mark.catches("plan-field-unknown"),
    "batch before state": pytest.mark.catches("state-unchecked"),
    "state of another model": pytest.mark.catches("state-of-another"),
    "state of another mesh": pytest.mark.catches("state-elsewhere"),
    "if on an array": pytest.mark.catches("values-asked-for"),
    "an array is missing": pytest.mark.catches("array-missing"),
    "text as numbers": pytest.mark.catches("text-as-numbers"),
    "a batch of no rows": pytest.mark.catches("no-rows"),
    "tokens beyond the vocabulary": pytest.mark.catches("tokens-unchecked"),
    "targets of another length": pytest.mark.catches("text-shapes"),
    "one batch as the batches": pytest.mark.catches("one-batch"),
    "callback not built": pytest.mark.catches("callbacks-unchecked"),
}
TABLE = {**BOOST, **PLAN, **STEP, **DATA, **EVALUATE, **FIT}


@pytest.fixture
def as_users_have_it():
    """Without the type checks that these tests put around the library's functions."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def sentence_of(call, *arguments, kind=InputError):
    """What a call says as it refuses: one sentence."""
    with pytest.raises(kind) as refused:
        call(*arguments)
    said = str(refused.value)
    assert "\n" not in said and not re.search(r"\. [A-Z]|Tracer", said), said
    return said


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=CATCHES.get(name, ())) for name in TABLE]
)
def test_one_sentence_names_culprit_and_remedy(here, mistake):
    call, culprit, remedy = TABLE[mistake]
    said = sentence_of(call, here, kind=PlanError if mistake in PLAN else InputError)
    assert culprit in said and remedy in said, said


def test_the_table_is_as_long_as_it_says():
    assert len(TABLE) >= 40


@pytest.fixture(scope="module")
def saved(here, tmp_path_factory):
    """Folders of states: of SGD, of AdamW, of another model; an empty one, and a file."""
    root = tmp_path_factory.mktemp("saved")
    narrow = made(Narrow)
    here.step.save(root / "sgd", here.state)
    here.adam.save(root / "adam", here.adam_state)
    narrow.save(root / "narrow", narrow.init())
    (root / "empty").mkdir()
    (root / "file").write_text("text")
    return root


RESTORE = {
    "nowhere": (lambda c, at: c.step.restore(at / "none"), "does not exist", "give the directory"),
    "an empty folder": (
        lambda c, at: c.step.restore(at / "empty"),
        "no finished",
        "give the directory",
    ),
    "a file": (lambda c, at: c.step.restore(at / "file"), "is a file", "give the directory"),
    "one step's own folder": (
        lambda c, at: c.step.restore(at / "sgd" / "0"),
        "is one checkpoint",
        "which holds it",
    ),
    "a step that is not there": (
        lambda c, at: c.step.restore(at / "sgd", at=7),
        "no step 7",
        "one of 0",
    ),
    "AdamW's state for SGD": (
        lambda c, at: c.step.restore(at / "adam"),
        "of another optimizer",
        "was saved with",
    ),
    "SGD's state for AdamW": (
        lambda c, at: c.adam.restore(at / "sgd"),
        "of another optimizer",
        "was saved with",
    ),
    "another model's state": (
        lambda c, at: c.step.restore(at / "narrow"),
        "'model/params/a/bias' is float32[4]",
        "model config",
    ),
    "saved twice": (
        lambda c, at: c.step.save(at / "sgd", c.state),
        "is there already",
        "another folder",
    ),
}


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.catches("restore-another-optimizer")
@pytest.mark.catches("one-steps-folder")
@pytest.mark.parametrize("mistake", RESTORE)
def test_what_cannot_be_restored_is_told_in_one_sentence(here, saved, mistake):
    call, culprit, remedy = RESTORE[mistake]
    said = sentence_of(call, here, saved, kind=CheckpointError)
    assert culprit in said and remedy in said, said


SAVE = {
    "folder and state by turns": (
        lambda c: c.step.save(c.state, "out"),
        "is a str",
        "state, metrics =",
    ),
    "parameters alone": (
        lambda c: c.step.save("out", c.state["params"]),
        "no 'opt_state'",
        "whole",
    ),
    "nothing kept": (lambda c: c.step.save("out", c.state, keep=0), "keep is 0", "1 or more"),
}


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize("mistake", SAVE)
def test_what_cannot_be_saved_is_told_in_one_sentence(here, tmp_path, monkeypatch, mistake):
    monkeypatch.chdir(tmp_path)
    call, culprit, remedy = SAVE[mistake]
    said = sentence_of(call, here)
    assert culprit in said and remedy in said and not list(tmp_path.iterdir()), said


@pytest.mark.catches("targets-of-no-weight")
def test_what_only_looks_like_a_mistake_works(here):
    """Lists, float64, int64 and bool in a batch; a target of weight 0 that is no token."""
    weights = np.ones((8, 16), bool)
    weights[0, 0] = False
    here.told(text(tokens=at_first(1, np.int64), targets=at_first(-100), weights=weights))
    placed = here.step.place({"x": [[1.0] * 8] * 8, "y": np.zeros(8)})
    assert {x.dtype for x in placed.values()} == {np.dtype(np.float32)}


@pytest.mark.catches("key-of-another")
def test_a_failure_within_a_loss_is_shown_as_it_is(here):
    others = {"a": 1}

    def own(model, batch):
        return others["b"]

    with pytest.raises(KeyError, match="b"):
        here.traced(own)


@pytest.mark.catches("optimizer-own-failure")
@pytest.mark.parametrize("kind", [AttributeError, KeyError, TypeError])
def test_a_failure_within_an_optimizer_is_shown_as_it_is(here, kind):
    def update(updates, state, params=None):
        raise kind("my own slip")

    own = optax.GradientTransformation(lambda params: (), update)
    for optimizer in (own, optax.chain(optax.clip(1.0), own)):
        with pytest.raises(kind, match="my own slip") as shown:
            here.traced(squares, optimizer=optimizer)
        assert not isinstance(shown.value, InputError)


def test_an_optimizer_that_wants_more_than_a_step_has_is_refused(here):
    def update(updates, state, params=None, *, hessian, **more):
        return updates, state

    own = optax.GradientTransformationExtraArgs(lambda params: (), update)
    for optimizer in (own, optax.chain(optax.clip(1.0), own)):
        assert "'hessian'" in sentence_of(here.traced, squares, optimizer)


@pytest.mark.catches("public-names-by-star")
def test_all_public_names_come_with_a_star():
    assert set(colossax.__all__) >= {"boost", "fit", "Plan", "preset"}


def test_the_fields_of_a_plan_are_still_its_arguments():
    plan = Plan(mesh={"fsdp": 2})
    assert dataclasses.replace(plan, tensor_layout="1d") == plan == Plan.from_json(plan.to_json())
