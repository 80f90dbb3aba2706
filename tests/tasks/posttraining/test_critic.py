"""Proximal policy optimisation: values, advantages and both losses by hand; runs with a critic."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.checkpoint import find_checkpoint
from colossax.config import Plan
from colossax.errors import InputError, PlanError
from colossax.inference import open_checkpoint
from colossax.models import MixtralConfig
from colossax.nn import AdapterConfig, HeadConfig, param
from colossax.planner import build_step
from colossax.recipes import recipe
from colossax.sharding import RowOrder, in_order
from colossax.tasks import (
    PolicyConfig,
    actor_critic_loss,
    critic_options,
    gae,
    kl_estimate,
    task_of,
    whitened,
)
from colossax.tasks.posttraining.policy_gradient.critic import gae_of_rows
from tests.tasks.posttraining import arithmetic, test_rollouts
from tests.tasks.posttraining.bigram import (
    DOCUMENTS,
    UNEVEN,
    Table,
    check,
    models_of,
    rows_of,
    said,
    weights_of,
)
from tests.tasks.posttraining.random_model import write_random
from tests.tasks.small_text import changed, ran

POLICY, REFERENCE, CRITIC = weights_of(0), weights_of(1), weights_of(2)
CONFIG = PolicyConfig(
    normaliser="token", estimator="k1", divergence=0.3, discount=0.9, decay=0.8, value=0.7
)
MODEL = test_rollouts.MODEL


class Values(nnx.Module):
    """What a loss asks of a critic: the first column of a table's logits."""

    config = types.SimpleNamespace(head=HeadConfig(outputs=1, bias=False))

    def __init__(self, table):
        self.into = param(table.into[...], ("vocab", "embed"))
        self.out = param(table.out[...], ("embed", "outputs"))

    def hidden(self, tokens, *, positions=None, segments=None):
        return self.into[...][tokens], {}

    def told(self, hidden, *, segments=None, documents=1):
        return (hidden @ self.out[...])[..., :1]


def given():
    """Rows whose answers earn something at their last token."""
    batch, rng = rows_of(UNEVEN), np.random.default_rng(4)
    batch["rewards"] = np.zeros(batch["tokens"].shape, np.float32)
    for row in range(len(UNEVEN)):
        for number in range(batch["segments"][row].max() + 1):
            batch["rewards"][row, np.flatnonzero(_told(batch, row, number))[-1]] = rng.normal()
    return batch


def _told(batch, row, number):
    return (batch["segments"][row] == number) & (batch["weights"][row] > 0)


def values(weights, batch):
    """What the critic says, in float64."""
    return (weights[0][batch["tokens"]] @ weights[1])[..., 0]


def prepared(config, batch):
    """What `critic_options` is to make, answer by answer."""
    told = batch["weights"] > 0
    old = np.where(told, values(CRITIC, batch), 0.0)
    apart = said(POLICY, batch) - said(REFERENCE, batch)
    costs = config.divergence * np.asarray(kl_estimate(jnp.asarray(apart), config.estimator))
    earned, found = np.where(told, batch["rewards"] - costs, 0.0), np.zeros(told.shape)
    for row in range(len(told)):
        for number in range(batch["segments"][row].max() + 1):
            own = _told(batch, row, number)
            how = {"discount": config.discount, "decay": config.decay}
            found[row, own] = gae(earned[row, own], old[row, own], **how)
    advantages = whitened(found, told) if config.whitened else found
    return {"old_values": old, "returns": found + old, "advantages": advantages}


def models(policy=POLICY, critic=CRITIC):
    tables = {"policy": Table(*policy), "reference": Table(*REFERENCE)}
    return models_of(**tables, critic=Values(Table(*critic)))


CASES = {
    "all of it": CONFIG,
    "k3, not whitened": dataclasses.replace(CONFIG, estimator="k3", whitened=False),
    "no divergence": dataclasses.replace(CONFIG, divergence=0.0),
}


@pytest.mark.catches("values-of-the-prompt-count")
@pytest.mark.catches("divergence-earns")
@pytest.mark.catches("advantages-of-a-neighbour")
@pytest.mark.catches("whitened-with-prompts")
@pytest.mark.parametrize("case", CASES)
def test_advantages_are_made_of_values_and_rewards(case):
    config, batch = CASES[case], given()
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    made = critic_options(config)["prepare"](models(), arrays)
    for name, wanted in prepared(config, batch).items():
        np.testing.assert_allclose(made[name], wanted, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.catches("values-unlearned")
@pytest.mark.parametrize("of", ["policy", "critic"])
def test_the_loss_is_that_of_both(of):
    """Value and gradient, by the policy's matrices and by the critic's."""
    batch = given()
    made = prepared(CONFIG, batch)
    rng = np.random.default_rng(1)
    old = said(POLICY, batch) + 0.2 * rng.normal(size=batch["tokens"].shape)
    made["old_values"] = made["old_values"] + 0.3 * rng.normal(size=old.shape)
    arrays = {**batch, **made, "old_logps": old}
    arrays = {n: x if x.dtype == np.int32 else x.astype(np.float32) for n, x in arrays.items()}
    told = batch["weights"] > 0
    inner = actor_critic_loss(CONFIG, documents=DOCUMENTS)

    def truth(weights):
        policy, critic = (weights, CRITIC) if of == "policy" else (POLICY, weights)
        ratio = np.exp(said(policy, batch) - arrays["old_logps"])[told]
        a = arrays["advantages"][told].astype(np.float64)
        gained = np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
        each = values(critic, batch), arrays["old_values"], arrays["returns"]
        v, before, r = (x[told] for x in each)
        near = before + np.clip(v - before, -0.2, 0.2)
        error = np.maximum((v - r) ** 2, (near - r) ** 2) / 2
        return 0.7 * error.mean() - gained.mean()

    def made_of(table):
        if of == "policy":
            return models_of(policy=table, critic=Values(Table(*CRITIC)))
        return models_of(policy=Table(*POLICY), critic=Values(table))

    def scalar(models, arrays):
        return inner(models, arrays)[0], {}

    check(scalar, truth, arrays, made_of, POLICY if of == "policy" else CRITIC)


@pytest.mark.catches("advantages-in-their-order")
def test_advantages_are_the_same_in_any_order():
    rng, batch = np.random.default_rng(0), given()
    told, segments = batch["weights"] > 0, batch["segments"]
    rewards, expected = rng.normal(size=(2, *told.shape)).astype(np.float32)
    how = {"discount": 0.9, "decay": 0.8}
    wanted = gae_of_rows(*map(jnp.asarray, (rewards, expected, told, segments)), **how)
    order = RowOrder(ranks=2)
    places = order.indices(told.shape[1])
    with in_order(order):
        moved = (jnp.asarray(x[:, places]) for x in (rewards, expected, told, segments))
        found = gae_of_rows(*moved, **how)
    np.testing.assert_allclose(found, np.asarray(wanted)[:, places], rtol=1e-6)


def test_what_is_missing_is_named():
    batch = {name: jnp.asarray(x) for name, x in given().items()}
    prepare = critic_options(CONFIG)["prepare"]
    for left, told in (("rewards", "no 'rewards'; add a number for each token"),):
        with pytest.raises(InputError, match=told):
            prepare(models(), {n: x for n, x in batch.items() if n != left})
    loss = actor_critic_loss(CONFIG, documents=DOCUMENTS)
    made = prepare(models(), batch)
    with pytest.raises(InputError, match="no 'returns'; give boost what critic_options"):
        loss(models(), {n: x for n, x in made.items() if n != "returns"})
    alone = models_of(policy=Table(*POLICY), reference=Table(*REFERENCE))
    with pytest.raises(InputError, match="critic: of the models .* name the one that tells values"):
        prepare(alone, batch)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of a random model, prompts, and a template of no words."""
    folder = tmp_path_factory.mktemp("base")
    write_random(MODEL, folder / "base")
    (folder / "plain.jinja").write_text(arithmetic.TEMPLATE)
    lines = [json.dumps({"prompt": f"{word}{n}"}) for n in range(9) for word in ("a", "bcd")]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    pairs = [{"prompt": f"{n}", "chosen": "a", "rejected": "bb"} for n in range(20)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    return folder


def config_of(folder, **policy):
    """A run of four steps."""
    config = test_rollouts.config_of(folder).replace(recipe="ppo", policy=recipe("ppo").policy)
    config = changed(changed(config, "objective", name="ppo"), "rollout", group=1)
    config = config.replace(steps=4, validate_every=2, checkpoint_every=2)
    return changed(config, "policy", **policy)


def numbers(folder):
    names = ("reward", "value", "return", "kl_k1", "entropy", "largest_ratio")
    return np.array([[one[name] for name in names] for one in test_rollouts.drawn(folder)])


@pytest.mark.catches("every-token-earns")
def test_an_answer_earns_its_reward_at_its_last_token(base):
    config = config_of(base)
    task, step, _, rollouts = test_rollouts.begun(config)
    with task.batches(step, 0) as batches:
        row = {name: np.asarray(x) for name, x in next(batches).items()}
    judged = rollouts._made
    assert set(row) == {*rows_of(UNEVEN), "rewards", "engine_logps"}
    rewards = iter(judged.rewards)
    for at in range(test_rollouts.ROWS):
        for number in range(test_rollouts.DOCUMENTS):
            own = row["rewards"][at, _told(row, at, number)]
            assert own[-1] == pytest.approx(next(rewards)) and not own[:-1].any()
    assert np.count_nonzero(row["rewards"]) == np.count_nonzero(judged.rewards)


@pytest.fixture(scope="module")
def rewarding(base, tmp_path_factory):
    """A run that learned rewards."""
    config = recipe("reward").replace(model=MODEL, init=str(base / "base"), steps=2)
    config = changed(config, "data", path=str(base / "pairs.jsonl"), seq_len=64, global_batch=8)
    folder = tmp_path_factory.mktemp("rewarding")
    ran(config.replace(plan=Plan()), folder)
    return folder


@pytest.mark.slow
@pytest.mark.catches("critic-has-an-adapter-too")
@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_resumed_on_other_meshes_is_one_that_nobody_touched(rank, base, rewarding, tmp_path):
    critic = str(rewarding) if rank else None
    config = config_of(base, divergence=0.1, critic=critic)
    config = config.replace(adapter=AdapterConfig(rank=rank))
    ran(config, tmp_path / "whole")
    for number, mesh in enumerate([{"fsdp": 2, "tensor": 2, "ring": 2}, {"data": 4, "ulysses": 2}]):
        part = config.replace(steps=2 * number + 2, plan=Plan(mesh=mesh))
        ran(part, tmp_path / "parts", resume="auto")
    whole, parts = numbers(tmp_path / "whole"), numbers(tmp_path / "parts")
    np.testing.assert_allclose(parts, whole, rtol=2e-4, atol=1e-5)
    np.testing.assert_array_equal(whole[:, -1], 1)
    assert whole[0, 3] == 0 and whole[-1, 3] != 0
    found = open_checkpoint(tmp_path / "whole")
    assert found.model == MODEL and found.adapter.rank == rank
    critic = open_checkpoint(tmp_path / "whole", "critic")
    assert critic.base is None and not critic.adapter
    # The critic is whole, so that it can be gone on from, whatever the policy is.
    again = config_of(base, critic=str(tmp_path / "whole")).replace(steps=1)
    ran(again, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.catches("critic-of-the-policy")
@pytest.mark.catches("named-model-or-none")
def test_a_critic_begins_as_a_model_that_rewards_or_as_an_earlier_critic(
    base, rewarding, tmp_path, capsys
):
    one = config_of(base, critic=str(rewarding)).replace(steps=1)
    ran(one, tmp_path / "one")
    assert f"critic: parameters from {rewarding}" in capsys.readouterr().err
    two = config_of(base, critic=str(tmp_path / "one")).replace(steps=1)
    ran(two, tmp_path / "two")
    assert f"critic: parameters from 'critic' of {tmp_path / 'one'}" in capsys.readouterr().err
    # A run that starts from one with a critic takes the policy, for all that it needs.
    three = config_of(base, divergence=0.1).replace(steps=1, init=str(tmp_path / "one"))
    ran(three, tmp_path / "three")
    told = capsys.readouterr().err
    for name in ("reference: ", "critic: "):
        assert f"{name}parameters from {tmp_path / 'one'}" in told
    records = find_checkpoint(str(tmp_path / "two")).records()
    assert {name.split("/")[0] for name in records} == {"model", "critic"}
    critic = open_checkpoint(tmp_path / "two", "critic").model
    assert critic.head == HeadConfig(outputs=1, bias=False)


@pytest.mark.catches("reference-decays")
def test_a_reference_does_not_learn():
    """Not even by the optimizer's decay; policy and critic do."""
    makers = {
        "policy": lambda rngs: Table(*POLICY),
        "reference": lambda rngs: Table(*REFERENCE),
        "critic": lambda rngs: Values(Table(*CRITIC)),
    }
    loss = actor_critic_loss(CONFIG, documents=DOCUMENTS)
    plan, devices = Plan(mesh={"fsdp": 1}), jax.devices()[:1]
    decays = optax.adamw(1e-2, weight_decay=0.5)
    step = build_step(makers, decays, loss, plan, devices=devices, **critic_options(CONFIG))
    state = step.init()
    before = jax.tree.map(np.asarray, state["params"])
    after = jax.tree.map(np.asarray, step(state, given())[0]["params"])
    for name, same in (("policy", False), ("critic", False), ("reference", True)):
        equal = [np.array_equal(before[name][one], after[name][one]) for one in ("into", "out")]
        assert equal == [same, same]


@pytest.mark.slow
@pytest.mark.catches("critic-unbalanced")
def test_a_critic_of_experts_is_balanced(base, tmp_path):
    sizes = {"vocab": 272, "embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 32}
    model = MixtralConfig(**sizes, max_seq=256, experts=4, choices=2)
    write_random(model, tmp_path / "mixture")
    config = config_of(base).replace(model=model, init=str(tmp_path / "mixture"))
    task, step, state, _ = test_rollouts.begun(config)
    with task.batches(step, 0) as batches:
        _, metrics = step(state, next(batches))
    names = {name for name in metrics if "balance" in name}
    assert {name.removeprefix("critic_") for name in names} < names


def test_flops_are_of_both(base):
    policy, reference = MODEL.decoder(), MODEL.decoder()
    critic = dataclasses.replace(MODEL, head=HeadConfig(outputs=1, bias=False)).decoder()
    each = policy.train_flops_per_token(32) + 4 / 3 * critic.train_flops_per_token(32)
    before = 2 / 3 * reference.train_flops_per_token(32)
    tokens = 32 * test_rollouts.ROWS
    for divergence, wanted in ((0.0, each), (0.1, each + before)):
        assert task_of(config_of(base, divergence=divergence)).flops == pytest.approx(
            tokens * wanted
        )


REFUSED = {
    "a critic of grpo": (
        lambda config: changed(config, "objective", name="grpo"),
        {"decay": 0.9},
        "policy.decay: is of ppo, which has a critic",
    ),
    "groups of ppo": (
        lambda config: changed(config, "rollout", scaled=False),
        {},
        "rollout.scaled: is of grpo",
    ),
    "stages": (
        lambda config: config.replace(plan=Plan(mesh={"stage": 2, "fsdp": 4})),
        {},
        "found stage=2, and stages share the layers of one model that learns",
    ),
    "decay": (lambda config: config, {"decay": 1.5}, "policy.decay: found 1.5"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_together_is_refused(what, base):
    change, policy, told = REFUSED[what]
    with pytest.raises((InputError, PlanError), match=told):
        change(config_of(base, **policy))
