"""Several steps that learn from the same answers: what the models said of them when they were given
is what all those steps, also of a run that was stopped between them, hold the policy against."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import OffloadConfig, PipelineConfig, Plan
from colossax.errors import InputError, PlanError
from colossax.inference.several import several
from colossax.nn import AdapterConfig
from colossax.tasks import PolicyConfig, policy_options, task_of
from tests.tasks.posttraining import test_critic, test_rollouts
from tests.tasks.posttraining.bigram import UNEVEN, Table, models_of, rows_of, weights_of
from tests.tasks.posttraining.test_rollouts import (
    DOCUMENTS,
    ROWS,
    after,
    begun,
    drawn,
    requests_of,
)
from tests.tasks.small_text import changed, ran

BATCHES, EPOCHS = 2, 2
UPDATES = BATCHES * EPOCHS


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """See `test_rollouts.write_base`."""
    return test_rollouts.write_base(tmp_path_factory.mktemp("base"))


def config_of(folder, objective="grpo", **policy):
    of = test_rollouts if objective == "grpo" else test_critic
    config = changed(of.config_of(folder), "policy", **policy)
    return changed(config, "rollout", batches=BATCHES, epochs=EPOCHS)


def said(step, params, batch):
    """Log-probability of each target, by the logits of the policy."""
    model = step.spec.merge(params)
    model = getattr(model, "model", model) if step.spec.model_names else model
    arrays = {name: jnp.asarray(batch[name]) for name in ("positions", "segments")}
    logits = model(jnp.asarray(batch["tokens"]), **arrays)
    each = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return np.take_along_axis(np.asarray(each), np.asarray(batch["targets"])[..., None], -1)[..., 0]


@pytest.mark.catches("answers-anew-in-each-step")
@pytest.mark.catches("old-logps-of-the-state-that-learns")
@pytest.mark.catches("first-batch-alone-is-learned")
def test_steps_learn_from_answers_of_one_state(base):
    """Two batches, each twice; then those of the model as it is by then."""
    task, step, state, rollouts = begun(config_of(base))
    first, logged, seen = jax.tree.map(jnp.copy, state["params"]), [], []
    with task.batches(step, 0) as batches:
        for done in range(1, UPDATES + 1):
            batch = next(batches)
            seen.append({name: np.asarray(x) for name, x in batch.items()})
            state, found = step(state, batch)
            rollouts(after(step, state, found, done, logged))
        last = jax.tree.map(jnp.copy, state["params"])
        seen.append({name: np.asarray(x) for name, x in next(batches).items()})
    for number in range(BATCHES):
        assert all(np.array_equal(x, seen[number + BATCHES][n]) for n, x in seen[number].items())
    assert not np.array_equal(seen[0]["tokens"], seen[1]["tokens"])
    for params, batch in ((first, seen[0]), (first, seen[1]), (last, seen[UPDATES])):
        told = batch["weights"] > 0
        wanted = said(step, params, batch)[told]
        np.testing.assert_allclose(batch["old_logps"][told], wanted, rtol=1e-4, atol=1e-5)
    # All were drawn by the state before the first of those steps.
    told = [one for batch in seen[:BATCHES] for one in answers(batch)]
    requests = requests_of(rollouts, 0, [prompt for prompt, _ in told])
    anew = several(step.spec, step.bound, first, requests=requests).run()
    assert [one.tokens for one in anew] == [answer for _, answer in told]
    # Of each step the policy is told, of the answers once. The first has a learning rate of 0.
    rewards = [numbers for numbers in logged if "reward" in numbers]
    assert [numbers["step"] for numbers in rewards] == [1]
    ratios = [numbers["largest_ratio"] for numbers in logged]
    assert ratios[0] == pytest.approx(1, abs=1e-5) and min(ratios[2:]) > 1.001
    assert logged[0]["clipped"] == 0 < logged[-1]["clipped"]


def answers(batch):
    """Prompt and answer of each document."""
    found = []
    for row, number in itertools.product(range(ROWS), range(DOCUMENTS)):
        own = np.flatnonzero(batch["segments"][row] == number)
        tokens = [*batch["tokens"][row, own].tolist(), int(batch["targets"][row, own[-1]])]
        told = np.append(False, batch["weights"][row, own] > 0)
        prompt = tuple(t for t, w in zip(tokens, told, strict=True) if not w)
        found.append((prompt, tuple(t for t, w in zip(tokens, told, strict=True) if w)))
    return found


@pytest.mark.catches("values-of-the-state-that-learns")
def test_a_critic_is_asked_once(base):
    """Advantages of a second pass are those of the first."""
    config = config_of(base, "ppo", divergence=0.1)
    task, step, state, rollouts = begun(config)
    prepare, seen = step.options.prepare, []
    model = step.spec.merge(jax.tree.map(jnp.copy, state["params"]))
    with task.batches(step, 0) as batches:
        for done in range(1, UPDATES + 1):
            batch = next(batches)
            seen.append({name: np.asarray(x) for name, x in batch.items()})
            state, found = step(state, batch)
            rollouts(after(step, state, found, done, []))
            told = seen[-1]["weights"] > 0
            assert float(found["return"]) == pytest.approx(seen[-1]["returns"][told].mean())
    made = ("advantages", "returns", "old_values", "old_logps", "reference_logps")
    for batch, again in zip(seen[:BATCHES], seen[BATCHES:], strict=True):
        wanted = prepare(model, {n: jnp.asarray(x) for n, x in batch.items() if n not in made})
        told = batch["weights"] > 0
        for name in made:
            np.testing.assert_array_equal(batch[name], again[name])
            x, y = batch[name][told], np.asarray(wanted[name])[told]
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=name)


NOWHERE_ELSE = [{"fsdp": 2, "tensor": 2, "ring": 2}] * 3
ELSEWHERE = [{"data": 4, "ulysses": 2}, {"fsdp": 2, "tensor": 2, "ring": 2}, {"ring": 8}]


@pytest.mark.slow
@pytest.mark.catches("kept-answers-are-lost")
@pytest.mark.parametrize(
    ("objective", "ends", "meshes"),
    [("grpo", (3, 4, 6), NOWHERE_ELSE), ("ppo", (1, 3, 5), ELSEWHERE)],
)
def test_a_run_that_is_stopped_between_them_learns_as_one_that_nobody_touched(
    objective, ends, meshes, base, tmp_path
):
    """On the same mesh to the bit; on others, where rows lie otherwise, to rounding."""
    config = config_of(base, objective, divergence=0.1)
    config = config.replace(steps=ends[-1], checkpoint_every=1, plan=Plan(mesh=NOWHERE_ELSE[0]))
    ran(config, tmp_path / "whole")
    for steps, mesh in zip(ends, meshes, strict=True):
        parts = config.replace(steps=steps, plan=Plan(mesh=mesh))
        ran(parts, tmp_path / "parts", resume="auto")
    names = ("entropy", "largest_ratio", "kl_k1", *(["value"] if objective == "ppo" else []))
    found = []
    for name in ("parts", "whole"):
        found.append([[one[key] for key in names] for one in recorded(tmp_path / name)])
        assert len(found[-1]) == ends[-1]
        assert [one["step"] for one in drawn(tmp_path / name)] == [1, 5]
    if meshes is NOWHERE_ELSE:
        assert found[0] == found[1]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3, atol=1e-5)


def recorded(folder):
    """What each step says of its policy."""
    return [one for one in test_rollouts.records(folder) if "largest_ratio" in one]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(mesh={"stage": 2, "fsdp": 4}),
        Plan(mesh={"fsdp": 8}, offload=OffloadConfig(parameters=1.0, optimizer=1.0)),
    ],
    ids=["stages", "host memory"],
)
def test_they_learn_alike_wherever_layers_are(plan, base, tmp_path):
    config = config_of(base).replace(steps=UPDATES)
    ran(config.replace(plan=Plan(mesh={"fsdp": 8})), tmp_path / "one")
    ran(config.replace(plan=plan), tmp_path / "other")
    found = [
        [
            [one[name] for name in ("entropy", "ratio", "clipped")]
            for one in recorded(tmp_path / name)
        ]
        for name in ("one", "other")
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_an_adapter_is_its_own_reference_of_each_step(base, tmp_path):
    config = config_of(base, divergence=0.1).replace(steps=3, adapter=AdapterConfig(rank=2))
    ran(config.replace(plan=Plan(mesh={"fsdp": 8})), tmp_path / "run")
    first, *_, last = (one["kl_k3"] for one in recorded(tmp_path / "run"))
    assert abs(first) < 1e-6 < last


@pytest.mark.catches("reference-asked-in-each-step")
def test_what_is_known_of_answers_is_not_asked_again():
    """The policy and its reference say something else."""
    prepare = policy_options(PolicyConfig(divergence=0.1), again=True)["prepare"]
    models = models_of(policy=Table(*weights_of(0)), reference=Table(*weights_of(1)))
    batch = {name: jnp.asarray(x) for name, x in rows_of(UNEVEN).items()}
    made = prepare(models, batch)
    assert set(made) == {*batch, "old_logps", "reference_logps"}
    known = {**batch, "old_logps": made["old_logps"] - 1, "reference_logps": made["old_logps"] - 2}
    again = prepare(models, known)
    assert all(again[name] is x for name, x in known.items())
    with pytest.raises(InputError, match="of the models .* none is it; name the one that learns"):
        prepare(models_of(first=Table(*weights_of(0))), batch)


@pytest.mark.catches("updates-are-another-run")
def test_a_run_goes_on_with_as_many_steps_of_each_answer(base):
    def identity(**rollout):
        return task_of(changed(config_of(base), "rollout", **rollout)).identity()["rollout"]

    found = identity()
    assert (found["batches"], found["epochs"]) == (BATCHES, EPOCHS)
    # Before there was a choice, runs did not name it.
    assert not {"batches", "epochs"} & identity(batches=1, epochs=1).keys()


@pytest.mark.catches("flops-of-what-is-asked-once")
def test_flops_are_counted_of_what_is_asked_before(base):
    each = test_rollouts.MODEL.decoder().train_flops_per_token(32)
    tokens = 32 * ROWS
    for divergence, asked in ((0.0, 1), (0.1, 2)):
        wanted = each * (1 + asked / 3 / EPOCHS)
        assert task_of(config_of(base, divergence=divergence)).flops == pytest.approx(
            tokens * wanted
        )


def test_programs_of_stages_have_nothing_to_ask(base, tmp_path):
    plan = Plan(mesh={"stage": 2, "fsdp": 4}, pipeline=PipelineConfig(cuts=(1, 1)))
    with pytest.raises(PlanError, match="prepare: it reads the whole model"):
        ran(config_of(base).replace(plan=plan), tmp_path / "run")
