"""Answers of the model in training: what is drawn, rewarded and learned; runs of it on any mesh."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import BatchConfig, Plan, Precision
from colossax.errors import DataError, InputError
from colossax.inference.generator import Generation
from colossax.inference.several import several
from colossax.models import LlamaConfig
from colossax.nn import AdapterConfig, HeadConfig
from colossax.planner.task_step import settle_task, task_step
from colossax.recipes import recipe
from colossax.run.calling import StepEnd, Tools
from colossax.scheduling import EngineRequest, SamplingConfig
from colossax.tasks import group_advantages, task_of
from colossax.tasks.posttraining.policy_gradient.answering import _cut
from tests.launching import ROOT, pair, run
from tests.serve.fake import CHATML, TOKENIZER
from tests.tasks.posttraining import arithmetic
from tests.tasks.posttraining.random_model import write_random
from tests.tasks.small_text import changed, ran

MODEL = LlamaConfig(
    vocab=272, embed=32, layers=2, heads=4, kv_heads=2, mlp=64, max_seq=256, init_std=0.1
)
MESHES = [{"fsdp": 2, "tensor": 2, "ring": 2}, {"data": 4, "ulysses": 2}, {"stage": 2, "fsdp": 4}]
GROUP, ROWS, DOCUMENTS, LONGEST = 4, 8, 2, 6


def share(answers):
    """How much of an answer is small letters."""
    return [sum(x.islower() for x in one.text) / LONGEST for one in answers]


def weighed(answers):
    """That, and what a judge says."""
    return [one.judged + letters for one, letters in zip(answers, share(answers), strict=True)]


def odd(answers):
    """Fails for answers that do not begin with a letter; no number for the others."""
    if any(not one.text[:1].isalpha() for one in answers):
        raise ValueError("no letter")
    return share(answers)


def nothing(answers):
    """Not a reward too many, but one too few."""
    return share(answers)[1:]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of a random model with a tokenizer of bytes, prompts, a template of no words."""
    return write_base(tmp_path_factory.mktemp("base"))


def write_base(folder):
    """That, into a folder."""
    write_random(MODEL, folder / "base")
    (folder / "plain.jinja").write_text(arithmetic.TEMPLATE)
    lines = [
        json.dumps({"prompt": f"{word}{n}", "n": n}) for n in range(9) for word in ("a", "bcd")
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def config_of(folder, **rollout):
    """A run of six steps, of sixteen answers each to four prompts."""
    config = recipe("grpo").replace(model=MODEL, init=str(folder / "base"), steps=6)
    config = config.replace(validate_every=3, checkpoint_every=3, plan=Plan(precision=Precision()))
    data = {"path": str(folder / "prompts.jsonl"), "seq_len": 32, "global_batch": ROWS}
    config = changed(config, "data", **data, validation_fraction=0.2, validation_batches=1)
    template = str(folder / "plain.jinja")
    config = changed(config, "objective", documents=DOCUMENTS, template=template)
    rewards = f"{__name__}:share"
    given = {"rewards": rewards, "group": GROUP, "max_tokens": LONGEST, "workers": 1, **rollout}
    config = changed(config, "rollout", **given)
    return changed(config, "optimizer", peak_lr=1e-2, warmup=1, schedule_steps=6)


def records(folder):
    """All that was recorded."""
    return [*map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


def drawn(folder):
    """What was recorded of each step's answers."""
    return [line for line in records(folder) if "reward_spread" in line]


def begun(config):
    """Task, step and state on one device; its callback has seen the state."""
    task, devices = task_of(config), jax.devices()[:1]
    step = task_step(task, settle_task(task, Plan(), devices), devices)
    state = step.init(seed=1)
    (rollouts,) = task.callbacks
    rollouts.start(step, state)
    return task, step, state, rollouts


def requests_of(rollouts, number, prompts):
    """What an engine is asked for rollout `number`."""
    draws = [
        SamplingConfig(temperature=1.0, seed=rollouts.answering._seed(number, at))
        for at in range(len(prompts))
    ]
    same = {"max_tokens": LONGEST, "ends": (TOKENIZER.eos,)}
    each = zip(prompts, draws, strict=True)
    return [EngineRequest(prompt=prompt, sampling=how, **same) for prompt, how in each]


def after(step, state, found, done, logged):
    """A run between two steps."""
    tools = Tools(evaluate=dict, record=logged.append, note=logged.append, save=lambda *a: None)
    return StepEnd(
        done=done, steps=6, step=step, state=state, metrics=found, evaluated={}, tools=tools
    )


@pytest.mark.catches("advantages-of-other-answers")
@pytest.mark.catches("prompts-are-learned")
@pytest.mark.catches("answers-of-the-model-before")
@pytest.mark.catches("engine-says-of-the-token-before")
def test_a_step_learns_from_what_the_model_says_then(base):
    """Of each batch every array is made again of its tokens, and the next one by what was learned;
    the engine's log-probabilities are those of training, and nothing is off its policy."""
    task, step, state, rollouts = begun(config_of(base))
    asked = {one.tokens: one for one in rollouts._opened().prompts}
    said, logged, groups = [], [], []
    with task.batches(step, 0) as batches:
        for done in (1, 2):
            batch = next(batches)
            given = jax.tree.map(jnp.copy, state["params"])
            rows = {name: np.asarray(x) for name, x in batch.items()}
            rewards, advantages, of = [], [], []
            for row, number in [(r, d) for r in range(ROWS) for d in range(DOCUMENTS)]:
                own = np.flatnonzero(rows["segments"][row] == number)
                tokens = [*rows["tokens"][row, own], rows["targets"][row, own[-1]]]
                told = np.append(False, rows["weights"][row, own] > 0)
                prompt = tuple(int(t) for t, w in zip(tokens, told, strict=True) if not w)
                answer = [int(t) for t, w in zip(tokens, told, strict=True) if w]
                assert prompt in asked, "a prompt and nothing else is not told"
                assert 1 <= len(answer) <= LONGEST
                text = TOKENIZER.decode([t for t in answer if t != TOKENIZER.eos])
                rewards.append(sum(x.islower() for x in text) / LONGEST)
                found = rows["advantages"][row, own][rows["weights"][row, own] > 0]
                assert len(set(found.tolist())) == 1
                advantages.append(found[0])
                of.append(prompt)
                said.append((prompt, tuple(answer)))
            groups.append(of)
            assert all(of[at : at + GROUP] == [of[at]] * GROUP for at in range(0, 16, GROUP))
            wanted = group_advantages(np.asarray(rewards), np.arange(16) // GROUP)
            np.testing.assert_allclose(advantages, wanted, atol=1e-6)
            assert not rows["advantages"][rows["weights"] == 0].any()
            state, found = step(state, batch)
            rollouts(after(step, state, found, done, logged))
            assert logged[-1]["reward"] == pytest.approx(np.mean(rewards))
    for numbers in logged:
        assert numbers["ratio"] == numbers["largest_ratio"] == 1
        assert 0 < numbers["engine_furthest"] <= 1e-5
    assert set(groups[0]) & set(groups[1]) == set(), "prompts come in turn"
    # The second batch is what the model after the first step says.
    requests = requests_of(rollouts, 1, [prompt for prompt, _ in said[16:]])
    anew = several(step.spec, step.bound, given, requests=requests).run()
    assert [one.tokens for one in anew] == [answer for _, answer in said[16:]]


@pytest.mark.slow
@pytest.mark.catches("resumed-prompts-begin-anew")
def test_a_run_resumed_on_other_meshes_is_one_that_nobody_touched(base, tmp_path):
    config = config_of(base).replace(steps=8, checkpoint_every=2)
    ran(config, tmp_path / "whole")
    for number, mesh in enumerate([*MESHES, MESHES[0]]):
        plan = Plan(mesh=mesh, batch=BatchConfig(accumulation=1 + number % 2))
        ran(config.replace(steps=2 * number + 2, plan=plan), tmp_path / "parts", resume="auto")
    found = []
    for name in ("whole", "parts"):
        steps = drawn(tmp_path / name)
        assert [one["step"] for one in steps] == [*range(1, 9)]
        found.append([(one["reward"], one["answer_tokens"], one["entropy"]) for one in steps])
        assert len({one["reward"] for one in steps}) > 1
        assert all(one["largest_ratio"] == 1 for one in steps)
    np.testing.assert_allclose(found[1], found[0], rtol=2e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.catches("reference-of-rollouts-forgotten")
@pytest.mark.catches("reference-answers")
@pytest.mark.parametrize(
    ("rank", "mesh"), [(2, {"fsdp": 8}), (0, {"fsdp": 8}), (0, {"stage": 2, "fsdp": 4})]
)
def test_a_policy_stays_near_what_it_was(rank, mesh, base, tmp_path):
    """By an adapter the reference is the model without it, else a second one."""
    config = config_of(base).replace(adapter=AdapterConfig(rank=rank), steps=3)
    config = config.replace(plan=Plan(mesh=mesh))
    config = changed(config, "policy", divergence=0.1, normaliser="token", clip_high=0.28)
    ran(config, tmp_path / "run")
    first, *_, last = drawn(tmp_path / "run")
    assert last["kl_k3"] > 0
    if "stage" in mesh:  # where the two models' passes are rounded apart
        assert abs(first["kl_k1"]) <= 1e-6 and first["kl_k3"] <= 1e-6
    else:
        assert first["kl_k3"] == first["kl_k1"] == 0
        assert last["engine_furthest"] <= 1e-5


@pytest.mark.slow
@pytest.mark.catches("failures-are-not-told")
def test_answers_that_cannot_be_judged_are_counted_and_end_nothing(base, tmp_path, capsys):
    config = config_of(base, rewards=f"{__name__}:odd", failed=-1.0).replace(steps=2)
    ran(config, tmp_path / "run")
    counts = [one["not_judged"] for one in drawn(tmp_path / "run")]
    assert len(counts) == 2 and min(counts) > 0
    assert "answers could not be judged (ValueError: no letter)" in capsys.readouterr().err


REFUSED = {
    "a group of one": ({}, {"group": 1}, "rollout.group: found 1; give"),
    "no groups": ({}, {"group": 5}, "a step has 16 answers"),
    "no room": ({}, {"max_tokens": 16}, "an answer has 16 tokens of a row"),
    "no rollouts": (
        {"objective": {"name": "sft"}},
        {},
        "rollout.rewards: is of answers that the model gives in the run",
    ),
    "beta": ({"objective": {"beta": 0.1}}, {}, "objective.beta: grpo has none"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_learned_is_refused_in_one_sentence(what, base):
    parts, rollout, told = REFUSED[what]
    with pytest.raises(InputError, match=told):
        config = config_of(base, **rollout)
        for part, fields in parts.items():
            config = changed(config, part, **fields)
        task_of(config)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (None, "rollout.rewards: grpo learns from what answers are worth"),
        ("share_", "has no attribute 'share_'"),
        ("nothing", "returns 3 rewards for 4 answers"),
    ],
)
def test_a_function_that_is_none_is_refused(name, told, base):
    """Before anything is written, or when it is first asked."""
    config = config_of(base, rewards=name and f"{__name__}:{name}")
    config = changed(config, "data", global_batch=2)
    with pytest.raises(InputError, match=told):
        task, step, _, _ = begun(config)
        task.identity()
        with task.batches(step, 0) as batches:
            next(batches)


def test_prompts_without_room_are_left_out_and_none_is_refused(base):
    config = config_of(base, max_tokens=13)
    told = task_of(config).introduction()[0]
    assert told == "data: 8 prompts, 1 held out, 9 left out as they leave no room for an answer"
    with pytest.raises(DataError, match="the shortest prompt has 2 tokens"):
        task_of(config_of(base, max_tokens=15)).identity()


@pytest.mark.catches("a-template-ends-no-answer")
def test_answers_end_as_the_template_ends_them(base):
    (base / "chatml.jinja").write_text(CHATML)
    config = changed(config_of(base), "objective", template=str(base / "chatml.jinja"))
    config = changed(config, "data", seq_len=160)
    (rollouts,) = task_of(config).callbacks
    end = TOKENIZER.specials["<|im_end|>"]
    assert rollouts._opened().ends == tuple(sorted((TOKENIZER.eos, end)))


@pytest.mark.catches("answers-go-on-behind-their-end")
def test_what_stands_behind_an_end_is_no_answer():
    """As stages write it, which know of one end."""
    said = Generation(
        prompt_tokens=(1,), tokens=(5, 9, 7), ended=False, logprobs=(-1.0, -2.0, -3.0)
    )
    found = _cut(said, (8, 9))
    assert (found.tokens, found.logprobs, found.ended) == ((5, 9), (-1.0, -2.0), True)
    assert _cut(said, (8,)) is said


@pytest.mark.catches("engines-see-no-optimizer")
def test_an_engine_is_told_what_the_optimizer_takes(base):
    _, step, state, rollouts = begun(config_of(base))
    moments = 2 * 4 * sum(x.size for x in jax.tree.leaves(state["params"]))
    assert moments <= rollouts.answering._beside <= 1.01 * moments


@pytest.mark.catches("held-out-of-one-source")
def test_each_source_has_its_share_of_what_is_held_out(base, tmp_path):
    """However few answers are asked for of it."""
    paths = {}
    for name, weight in (("a", 0.75), ("b", 0.25)):
        lines = [json.dumps({"prompt": f"{name}{n:03}"}) for n in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        paths[str(tmp_path / f"{name}.jsonl")] = weight
    config = changed(config_of(base), "data", path=None, mixture=paths, validation_fraction=0.4)
    (rollouts,) = task_of(config).callbacks
    found = rollouts._opened()
    names = [found.prompts[at].messages[0]["content"][0] for at in found.held_out[:16]]
    assert names.count("b") == 4


@pytest.mark.slow
@pytest.mark.catches("seats-of-a-run-are-fixed")
def test_a_run_goes_on_with_other_seats_and_is_told_its_reward_once_more(base, tmp_path):
    config = config_of(base).replace(steps=1, validate_every=0)
    before = ran(config, tmp_path / "run")
    other = changed(config, "rollout", seats=2, seconds=3.0)
    after = ran(other, tmp_path / "run", resume=True)
    assert after["validation_reward"] == before["validation_reward"]
    with pytest.raises(InputError, match="rollout"):
        ran(changed(config, "rollout", group=2), tmp_path / "run", resume=True)


@pytest.mark.sweep
@pytest.mark.parametrize("more", [(), ("--rollout.batches=2", "--rollout.epochs=2")])
def test_two_processes_are_as_one(more, base, tmp_path):
    """Both write, by one engine over all devices, and both judge; the first rewards."""
    model = dataclasses.replace(MODEL, head=HeadConfig(outputs=1, pool="last", bias=False))
    write_random(model, tmp_path / "judge", seed=2)
    small = (
        "grpo",
        f"--init={base / 'base'}",
        f"--objective.template={base / 'plain.jinja'}",
        f"--rollout.rewards={__name__}:weighed",
        f"--rollout.judge={tmp_path / 'judge'}",
        f"--rollout.max_tokens={LONGEST}",
        f"--rollout.group={GROUP}",
        "--objective.documents=2",
        "--data.seq_len=32",
        f"--data.global_batch={ROWS}",
        "--data.validation_fraction=0.2",
        "--optimizer.peak_lr=0.01",
        "--plan.precision.compute=float32",
        "--plan.mesh=data=2,fsdp=4",
        "--steps=3",
        *more,
    )
    text, found = base / "prompts.jsonl", []
    together = pair(
        "--devices=4", f"--out={tmp_path / 'two'}", text=text, folder=tmp_path, small=small
    )
    first, second = (process.finish() for process in together)
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    out = f"--out={tmp_path / 'one'}"
    alone = run("--devices=8", out, text=text, log=tmp_path / "log", small=small)
    assert alone.code == 0, alone.errors
    for name in ("two", "one"):
        learned = [one for one in records(tmp_path / name) if "entropy" in one]
        found.append([(one.get("reward", 0), one["entropy"], one["ratio"]) for one in learned])
    assert len(found[0]) == 3
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@pytest.mark.sweep
def test_sums_are_learned_from_rewards_alone(tmp_path):
    """One of the five seeds of bench/grpo_sums.py, all of which learn them."""
    words = (sys.executable, "-m", arithmetic.__name__, str(tmp_path), "150", "4")
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}  # one device
    told = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    rewards = json.loads(told.stdout.splitlines()[-1])
    assert len(rewards) == 150
    assert np.mean(rewards[:5]) < 0.3
    assert np.mean(rewards[-20:]) >= 0.9
