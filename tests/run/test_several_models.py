"""A run of several models: a policy and a critic that learn, beside a reference that does not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax import optim
from colossax.checkpoint import RecordReader
from colossax.config import BatchConfig, OffloadConfig, Plan, preset
from colossax.errors import CheckpointError, InputError, PlanError
from colossax.planner.task_step import settle_task, task_step
from colossax.processes import Group
from colossax.run import RunConfig, RunOptions, train
from colossax.run.initial import initial_params
from colossax.run.origins import origins_of
from colossax.step import StepOptions
from tests.oracle import assert_losses_close, assert_trees_close
from tests.run.test_task import PLAN, TwoLayers, rows, squares, toy
from tests.step.test_several_models import Critic
from tests.step.test_step import text_batch

MAKERS = dict.fromkeys(("policy", "reference", "critic"), TwoLayers)
OPTIMIZERS = {"policy": optim.adamw(1e-2), "critic": optax.sgd(1e-3, momentum=0.9)}
OTHER = preset("zero3", mesh={"fsdp": 2, "tensor": 2}, batch=BatchConfig(accumulation=2))
STEPS = 4
SIZE = 5 * 8
"""Numbers of a model."""


def said_by_the_reference(models, batch):
    return {**batch, "said": models.reference(batch["x"])}


def loss(models, batch):
    """The policy fits the batch and stays near the reference, the critic fits what it missed."""
    own, count = models.policy(batch["x"]), jnp.float32(batch["y"].size)
    missed = jax.lax.stop_gradient(own - batch["y"])
    terms = {
        "squares": (jnp.sum((own - batch["y"]) ** 2), count, 1.0),
        "distance": (jnp.sum((own - batch["said"]) ** 2), count, 0.1),
        "critic": (jnp.sum((models.critic(batch["x"]) - missed) ** 2), count, 0.5),
    }
    return terms, {}


def held_out(step, state):
    totals = jax.device_get(step.evaluate(state, rows(10**6)))
    return {f"held_out_{name}": total / weight for name, (total, weight) in totals.items()}


def three(**changes):
    options = StepOptions(
        batch_dims={"x": ("batch", None), "y": ("batch",), "said": ("batch",)},
        prepare=said_by_the_reference,
        trainable=lambda info: info.model != "reference",
    )
    changes = {"make_model": MAKERS, "optimizer": OPTIMIZERS, "options": options, **changes}
    return toy(name="three", loss=loss, evaluators={"held_out": held_out}, **changes)


def trained(task, out, *, steps=STEPS, plan=PLAN, init=None, resume=False):
    config = RunConfig(plan=plan, steps=steps, validate_every=2, init=init)
    emitted = []
    size = int(np.prod(list(plan.mesh.values())))
    where = RunOptions(
        out=str(out), devices=lambda: jax.devices()[:size], emit=emitted.append, resume=resume
    )
    outcome = train(task, config, where, Group(None, {}))
    return outcome, {row["step"]: row["loss"] for row in emitted if "loss" in row}


def stored(run, model):
    """Parameters in the last checkpoint of a run, by path."""
    reader, prefix = RecordReader(run / "checkpoints"), f"{model}/params/"
    names = [name for name in reader.records() if name.startswith(prefix)]
    assert names
    return {name.removeprefix(prefix): reader.read(name) for name in names}


def assert_same(found, want):
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("three") / "run"
    return out, *trained(three(), out)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run of a single model."""
    out = tmp_path_factory.mktemp("one") / "run"
    trained(toy(), out, steps=1)
    return out


def step_of(task, plan=PLAN):
    return task_step(task, plan, jax.devices()[: int(np.prod(list(plan.mesh.values())))])


def test_two_learn_by_optimizers_of_their_own_and_a_third_stays(whole):
    out, outcome, losses = whole
    assert losses[STEPS] < losses[1]
    final = outcome.final
    assert final["held_out_squares"] > 0 and final["held_out_critic"] > 0
    start = step_of(three()).init()["params"]
    for name in MAKERS:
        moved = [
            not np.array_equal(value, start[name][path])
            for path, value in stored(out, name).items()
        ]
        assert moved == [name != "reference"] * 2
    records = {name.rsplit("/", 1)[0] for name in RecordReader(out / "checkpoints").records()}
    assert {"policy/optimizer/0/mu", "critic/optimizer/0/trace"} < records
    assert not any(record.startswith("reference/optimizer") for record in records)


@pytest.mark.catches("models-counted-together")
def test_parameters_are_counted_by_model(whole, tmp_path, capsys):
    final = whole[1].final
    assert final["parameters"] == 3 * SIZE
    assert final["parameters_by_model"] == dict.fromkeys(MAKERS, SIZE)
    trained(three(), tmp_path / "run", steps=1)
    shown = "0.00 M parameters (critic 0.00 M, policy 0.00 M, reference 0.00 M frozen) on 2 cpu"
    assert shown in capsys.readouterr().err
    alone, _ = trained(toy(), tmp_path / "one", steps=1)
    assert alone.final["parameters"] == SIZE and "parameters_by_model" not in alone.final


def test_stopped_it_goes_on_to_the_bit(whole, tmp_path):
    stopped, first = trained(three(stop_at=2), tmp_path)
    assert stopped.stopped_by == "SIGTERM"
    resumed, rest = trained(three(), tmp_path, resume=True)
    assert {**first, **rest} == whole[2] and min(rest) == max(first) + 1
    for name in MAKERS:
        assert_same(stored(tmp_path, name), stored(whole[0], name))
    assert resumed.final["held_out_critic"] == whole[1].final["held_out_critic"]


def test_it_goes_on_on_another_mesh(whole, tmp_path):
    """Cut otherwise, and in two microbatches."""
    _, first = trained(three(), tmp_path, steps=2)
    resumed, rest = trained(three(), tmp_path, resume=True, plan=OTHER)
    for step, found in {**first, **rest}.items():
        assert_losses_close(found, whole[2][step])
    assert resumed.final["step"] == STEPS
    assert_trees_close(stored(tmp_path, "policy"), stored(whole[0], "policy"))


@pytest.mark.parametrize("plan", [PLAN, OTHER])
def test_it_starts_from_a_checkpoint_of_the_same_models(whole, plan):
    out, step = whole[0], step_of(three(), plan)
    params = initial_params(origins_of(str(out), step.spec.model_names), step)
    for name in MAKERS:
        assert_same({path: params[name][path] for path in ("into", "out")}, stored(out, name))
        wanted = step.shardings["params"][name]
        assert jax.tree.map(lambda array: array.sharding, params[name]) == wanted


@pytest.mark.catches("init-of-another-model")
def test_policy_and_reference_start_from_one_checkpoint_of_a_single_model(one, tmp_path, capsys):
    init = {"policy": str(one), "reference": str(one)}
    _, losses = trained(three(), tmp_path / "run", steps=1, init=init)
    shown = capsys.readouterr().err
    assert f"policy: parameters from {one}\nreference: parameters from {one}\n" in shown
    assert_same(stored(tmp_path / "run", "reference"), stored(one, "model"))
    step = step_of(three())
    params = initial_params(origins_of(init, step.spec.model_names), step, seed=0)
    assert_same(params["policy"], params["reference"])
    assert_same(params["critic"], step.init(0)["params"]["critic"])  # random as ever
    metrics = step(step.init_from(params), rows(0))[1]
    assert float(metrics["distance"]) == 0 and float(metrics["loss"]) == losses[1]


@pytest.mark.catches("init-of-another-model")
def test_a_model_starts_from_any_of_a_checkpoint_of_several(whole, tmp_path):
    """Under another name, and one that is alone."""
    out = str(whole[0])
    init = {"policy": out, "reference": (out, "policy")}
    trained(three(), tmp_path / "three", steps=1, init=init)
    assert_same(stored(tmp_path / "three", "reference"), stored(whole[0], "policy"))
    step = step_of(toy())
    params = initial_params(origins_of((out, "critic"), ()), step)
    assert_same(params, stored(whole[0], "critic"))


def test_the_only_model_of_a_checkpoint_needs_no_name(tmp_path):
    """Of a run of one model by name, whose folder is a path object."""

    def loss(models, batch):
        return squares(models.judge, batch)

    task = toy(make_model={"judge": TwoLayers}, loss=loss, evaluators={})
    trained(task, tmp_path, steps=1)
    for init, names in (({"policy": tmp_path}, ("policy", "critic")), (tmp_path, ())):
        (origin,) = origins_of(init, names).values()
        assert (origin.model, str(origin)) == ("judge", f"'judge' of {tmp_path}")


@pytest.mark.catches("init-names-unchecked")
def test_what_does_not_fit_is_refused_before_anything_is_written(whole, one, tmp_path):
    out, single = str(whole[0]), str(one)
    names = "'critic', 'policy' and 'reference'"
    cases = [
        (three(), single, f"trains {names}, and '.*' holds one model without a name; say by name"),
        (three(), (out, "policy"), "as in {'critic': \\('.*', 'policy'\\)}"),
        (three(), {"judge": single}, f"it names 'judge', and the run trains {names}; name"),
        (three(), {}, "it names no model, and the run trains"),
        (three(), {"policy": (out, "judge")}, f"holds {names} and not 'judge'; give one of its"),
        (
            toy(),
            {"policy": single},
            "names 'policy', and the run trains one .*; give the checkpoint alone",
        ),
        (toy(), out, f"holds {names} and not one model without a name; give .* 'critic'\\)"),
    ]
    for task, init, message in cases:
        with pytest.raises(InputError, match=message):
            trained(task, tmp_path / "run", init=init)
        assert not (tmp_path / "run").exists()
    wider = {**MAKERS, "policy": lambda rngs: TwoLayers(rngs, width=16)}
    with pytest.raises(CheckpointError, match="'policy/params/into' is .* there and .* here"):
        trained(three(make_model=wider), tmp_path / "run", init=out)


def stacks(optimizer):
    """Of two models of layers, told apart by their random keys alone."""

    def loss(models, batch):
        return {name: models[name].loss(batch) for name in ("first", "second")}, {}

    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in text_batch().items()}
    makers = {"first": Critic, "second": Critic}
    return toy(
        make_model=makers, optimizer=optimizer, loss=loss, shapes=shapes, options=StepOptions()
    )


def test_what_a_plan_leaves_open_is_settled_for_all_models_or_refused():
    """The planner asks for a task's step alone; layer by layer one optimizer serves all."""
    plan = Plan(offload=OffloadConfig(auto=True, device_gb=1.0, host_gb=1.0))
    device = jax.devices()[:1]
    settled = settle_task(stacks(optim.adamw(1e-2)), plan, device)
    assert settled.fitted.resident == dict.fromkeys(("parameters", "optimizer", "activations"), 2)
    own = {"first": optim.adamw(1e-2), "second": optim.adamw(1e-3)}
    with pytest.raises(PlanError, match="models with optimizers of their own are not; give all"):
        settle_task(stacks(own), plan, device)
