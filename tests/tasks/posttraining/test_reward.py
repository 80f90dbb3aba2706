"""Models that learn what answers are worth, and what they are worth to a model that answers."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.checkpoint import RecordReader, find_checkpoint
from colossax.config import Plan, Precision
from colossax.data.chats.prompts import Prompt
from colossax.errors import CheckpointError, InputError
from colossax.inference import open_checkpoint
from colossax.models import (
    LlamaConfig,
    maker,
)
from colossax.models.adapters.peft import export_peft
from colossax.models.adapters.stored import learned_head
from colossax.models.hf import copy_checkpoint, export_checkpoint
from colossax.models.parameters import params_of_checkpoint
from colossax.nn import AdapterConfig, HeadConfig, with_new_head
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.planner.task_step import settle_task, task_step
from colossax.recipes import recipe
from colossax.run.initial import initial_params
from colossax.run.origins import origins_of
from colossax.tasks import next_token_loss, task_of
from colossax.tasks.posttraining.rewards.judge import Judge
from tests.launching import ROOT, metrics
from tests.serve.fake import TOKENIZER
from tests.tasks.posttraining import arithmetic, statements
from tests.tasks.posttraining.random_model import write_random
from tests.tasks.small_text import changed, ran

MODEL = LlamaConfig(
    vocab=272, embed=32, layers=2, heads=4, kv_heads=2, mlp=64, max_seq=256, init_std=0.1
)
ADAPTER = AdapterConfig(rank=2, targets="*")
REWARD = HeadConfig(outputs=1, pool="last", bias=False)
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": "no " * (1 + a % 3)}
    for a in range(6)
    for b in range(6)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of a random language model, pairs, and a template that ends answers."""
    folder = tmp_path_factory.mktemp("base")
    write_random(MODEL, folder / "base")
    (folder / "plain.jinja").write_text(arithmetic.TEMPLATE)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in PAIRS))
    return folder


def config_of(folder, **changes):
    """A run of two steps on the pairs."""
    config = recipe("reward").replace(
        model=MODEL, init=str(folder / "base"), steps=2, plan=Plan(precision=Precision())
    )
    path = str(folder / "pairs.jsonl")
    config = changed(config, "data", path=path, seq_len=96, global_batch=8, validation_fraction=0.2)
    config = changed(config, "objective", template=str(folder / "plain.jinja"))
    config = changed(config, "optimizer", peak_lr=3e-3, warmup=1, schedule_steps=6)
    return config.replace(**changes)


@pytest.fixture(scope="module")
def rewarding(base, tmp_path_factory):
    """A run that learned rewards, all of it or by an adapter."""
    folder = tmp_path_factory.mktemp("rewarding")
    ran(config_of(base), folder / "whole")
    ran(config_of(base, adapter=ADAPTER), folder / "adapter")
    ran(config_of(base, adapter=ADAPTER, init=str(folder / "whole")), folder / "both")
    return folder


def started(config):
    """The step of a run on one device."""
    task, devices = task_of(config), jax.devices()[:1]
    return task_step(task, settle_task(task, Plan(), devices), devices)


def tokens_of(question, answer):
    return TOKENIZER.encode(question) + TOKENIZER.encode(answer) + [TOKENIZER.eos]


def stored(path):
    """The parameters of a checkpoint's model."""
    return params_of_checkpoint(find_checkpoint(str(path)))


def numbers(path):
    """Those by their paths."""
    found = stored(path)
    infos, arrays = jax.tree.leaves(found.spec.infos), jax.tree.leaves(found.tree())
    return {info.path: x for info, x in zip(infos, arrays, strict=True)}


def worth(path, tokens):
    """What a checkpoint's model says of one document."""
    found = stored(path)
    params = jax.tree.map(jnp.asarray, found.tree())
    told = found.spec.merge(params)(jnp.asarray([tokens], jnp.int32))
    return float(told[0, 0, 0])


@pytest.mark.catches("last-token-unread")
def test_documents_are_read_to_their_last_token(base):
    task = task_of(config_of(base))
    step = task_step(task, settle_task(task, Plan(), jax.devices()[:1]), jax.devices()[:1])
    with task.batches(step, 0) as batches:
        rows = {name: np.asarray(x) for name, x in next(batches).items()}
    known = {
        tuple(tokens_of(one["prompt"], one[side])): side
        for one in PAIRS
        for side in ("chosen", "rejected")
    }
    for row in range(8):
        count = rows["segments"][row].max() + 1
        assert count >= 2 and count % 2 == 0
        for number in range(count):
            own = rows["segments"][row] == number
            tokens = tuple(rows["tokens"][row, own].tolist())
            assert known[tokens] == ("chosen", "rejected")[number % 2]
            answer = len(tokens) - len(TOKENIZER.encode("1+1="))
            assert rows["weights"][row, own].sum() == answer
            assert rows["weights"][row, own][-1] == 0, "nothing is told behind it"


@pytest.mark.catches("new-head-is-asked-for")
@pytest.mark.catches("vocabulary-is-no-head")
def test_the_layers_are_those_of_the_checkpoint_and_the_head_is_drawn(base):
    config = config_of(base)
    assert config.model.head == REWARD and config.replace(steps=9).model == config.model
    step = started(config)
    infos = jax.tree.leaves(step.spec.infos)
    arrays = jax.tree.leaves(initial_params(origins_of(config.init, ()), step))
    has = {info.path: np.asarray(x) for info, x in zip(infos, arrays, strict=True)}
    had = numbers(base / "base")
    assert has.keys() - had.keys() == {"answers/map/w"}
    assert had.keys() - has.keys() == {"head/w"}
    for path in had.keys() & has.keys():
        np.testing.assert_array_equal(has[path], had[path], err_msg=path)
    assert np.abs(has["answers/map/w"]).max() > 0


@pytest.mark.catches("new-head-is-frozen")
@pytest.mark.catches("new-head-has-an-adapter")
def test_beside_an_adapter_the_head_learns_as_a_whole(base):
    infos = jax.tree.leaves(started(config_of(base, adapter=ADAPTER)).spec.infos)
    (head,) = (info for info in infos if info.path.startswith("answers/"))
    assert head.learns and not head.of_base and head.path == "answers/map/w"
    assert all(info.of_base != info.learns for info in infos)


@pytest.mark.slow
def test_a_run_of_an_adapter_and_a_head_goes_on(base, tmp_path):
    config = config_of(base, adapter=ADAPTER, steps=4)
    ran(config, tmp_path / "whole")
    for steps in (2, 4):
        ran(config.replace(steps=steps), tmp_path / "parts", resume="auto")
    whole, parts = (
        [loss or held_out for _, loss, held_out in metrics(tmp_path / name)]
        for name in ("whole", "parts")
    )
    np.testing.assert_allclose([parts[0], parts[-1]], [whole[0], whole[-1]], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapter", "both"])
@pytest.mark.catches("head-of-a-base-is-adapted")
@pytest.mark.catches("head-of-a-base-is-merged")
def test_an_adapter_and_the_head_beside_it_are_one_model_when_merged(name, base, rewarding):
    """Also where the model rewarded before."""
    held = find_checkpoint(str(rewarding / name))
    names = {name for name in held.records() if name.startswith("model/params/")}
    assert "model/params/answers/map/w" in names
    assert all("/down" in name or "/up" in name for name in names - {"model/params/answers/map/w"})
    copy_checkpoint(rewarding / name, rewarding / f"{name} merged")
    merged = open_checkpoint(rewarding / f"{name} merged")
    assert merged.model.head == REWARD
    final = json.loads((rewarding / name / "metrics.jsonl").read_text().splitlines()[-1])
    again = ran(
        changed(config_of(base, init=str(rewarding / f"{name} merged")), "optimizer", peak_lr=0.0),
        rewarding / f"{name} again",
    )
    assert again["validation_loss"] == pytest.approx(final["validation_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.catches("pairs-of-peft-leave-a-head-out")
@pytest.mark.catches("adapters-are-read-without-their-head")
def test_what_has_no_place_for_a_head_says_so(base, rewarding, tmp_path):
    with pytest.raises(InputError, match="own head learned as a whole.*with --merge"):
        export_peft(rewarding / "adapter", tmp_path / "peft")
    with pytest.raises(InputError, match="a head that learned beside it.*--as-checkpoint"):
        open_checkpoint(rewarding / "adapter")
    export_checkpoint(rewarding / "adapter", tmp_path / "hf", max_shard_bytes=1 << 30)
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert said["architectures"] == ["LlamaForSequenceClassification"]


def test_a_checkpoint_that_lacks_more_than_a_head_is_refused(base, tmp_path):
    other = dataclasses.replace(MODEL, layers=1)
    with pytest.raises(CheckpointError, match="of another model"):
        ran(config_of(base, model=other), tmp_path / "run")


@pytest.mark.catches("head-is-any-part")
def test_parts_that_are_no_head_are_not_left_out(base, tmp_path):
    write_random(dataclasses.replace(MODEL, attention_bias=True), tmp_path / "biased")
    with pytest.raises(InputError, match="which the run's model has not; use the model's"):
        ran(config_of(base, init=str(tmp_path / "biased")), tmp_path / "run")


@pytest.mark.catches("any-new-part-is-a-head")
def test_beside_an_adapter_alone_all_of_a_checkpoint_is_read(base, tmp_path):
    config = recipe("simpo").replace(model=dataclasses.replace(MODEL, tied=True), steps=1)
    config = changed(config, "data", path=str(base / "pairs.jsonl"), seq_len=96, global_batch=8)
    config = config.replace(adapter=AdapterConfig(rank=2), init=str(base / "base"))
    with pytest.raises(CheckpointError, match="'model/params/head/w', which this model has not"):
        ran(config, tmp_path / "run")


@pytest.mark.catches("new-parts-know-no-seed")
def test_a_new_head_is_drawn_by_the_seed_of_the_run(base):
    step = started(config_of(base))
    origins = origins_of(str(base / "base"), ())
    heads = [
        np.asarray(initial_params(origins, step, seed)["answers"]["map"]["w"][...])
        for seed in (0, 1)
    ]
    assert not np.array_equal(*heads)


REFUSED = {
    "a head of classes": (
        {"model": dataclasses.replace(MODEL, head=HeadConfig(outputs=3, pool="last"))},
        {},
        "a reward is one number of each document",
    ),
    "beta": ({}, {"beta": 0.1}, "objective.beta: reward has none"),
    "odd": ({}, {"documents": 3}, "objective.documents: found 3, and reward has pairs"),
}


@pytest.mark.catches("any-head-rewards")
@pytest.mark.parametrize("what", REFUSED)
def test_what_tells_no_reward_is_refused(what, base):
    fields, objective, told = REFUSED[what]
    with pytest.raises(InputError, match=told):
        changed(config_of(base).replace(**fields), "objective", **objective)


def test_a_model_without_a_head_has_no_new_one():
    with pytest.raises(InputError, match="with_new_head: the model has no head but that of its"):
        build_step(with_new_head(maker(MODEL)), adamw(1e-3), next_token_loss(), Plan())


def prompts(*questions):
    return [
        Prompt(tokens=(1,), messages=({"role": "user", "content": one},), record={})
        for one in questions
    ]


@pytest.mark.slow
@pytest.mark.catches("judge-reads-no-answer")
def test_a_judge_says_what_the_model_says_of_prompt_and_answer(rewarding):
    judge = Judge(str(rewarding / "whole"))
    judge.load(jax.devices())
    asked, texts = ["1+1=", "2+3=", "2+3="], ["2", "5", "no no "]
    found = judge(prompts(*asked), texts)
    wanted = [worth(rewarding / "whole", tokens_of(*one)) for one in zip(asked, texts, strict=True)]
    np.testing.assert_allclose(found.values, wanted, rtol=1e-5, atol=1e-6)
    assert not found.failures and len(set(wanted)) == 3


@pytest.mark.slow
@pytest.mark.catches("rewards-as-wide-as-states")
@pytest.mark.catches("rewards-are-no-numbers-of-texts")
@pytest.mark.catches("rewards-are-embeddings")
def test_an_embedder_tells_rewards_and_no_server_takes_them_for_embeddings(rewarding):
    stored = open_checkpoint(rewarding / "whole")
    texts = [tokens_of("1+1=", one) for one in ("2", "no ")]
    found = stored.load(unroll=True).embedder().embed(texts)
    wanted = [[worth(rewarding / "whole", one)] for one in texts]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert not stored.embeds


@pytest.mark.slow
@pytest.mark.catches("alike-answers-are-read-again")
def test_answers_that_are_alike_are_worth_the_same(rewarding):
    """To the last bit, as each is read once: what differs by rounding would be learned."""
    judge = Judge(str(rewarding / "whole"))
    judge.load(jax.devices())
    texts = ["2", "7 or 8"] * 12
    found = judge(prompts(*["1+1="] * 24), texts)
    assert len(set(found.values[::2])) == len(set(found.values[1::2])) == 1
    assert found.values[0] != found.values[1]
    assert judge._embedder.stats.tokens == sum(len(tokens_of("1+1=", one)) for one in texts[:2])


@pytest.mark.slow
@pytest.mark.catches("devices-that-divide-nothing")
def test_a_judge_is_whole_on_devices_that_do_not_divide_it(rewarding):
    found = []
    for count in (1, 3):
        judge = Judge(str(rewarding / "whole"))
        judge.load(jax.devices()[:count])
        found.append(judge(prompts("1+1=", "2+2="), ["2", "5"]).values)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.slow
def test_answers_that_a_judge_cannot_read_are_counted(rewarding):
    judge = Judge(str(rewarding / "whole"))
    judge.load(jax.devices())
    found = judge(prompts("1+1=", "2+2=", "3+3="), ["2", "x" * 300, "6"])
    assert np.isnan(found.values).tolist() == [False, True, False]
    assert found.failures == {"unread": 1} and "at most 256 are read" in found.said


@pytest.mark.catches("any-model-judges")
def test_a_judge_that_tells_no_reward_is_refused(base):
    with pytest.raises(InputError, match="rollout.judge: the model of .* tells the next token"):
        Judge(str(base / "base"))
    with pytest.raises(CheckpointError, match="rollout.judge: .* does not exist"):
        Judge(str(base / "none"))


@pytest.mark.slow
def test_an_adapter_that_rewards_is_no_judge_before_it_is_merged(rewarding):
    with pytest.raises(InputError, match="rollout.judge: .* colossax export --merge"):
        Judge(str(rewarding / "adapter"))


class Records(RecordReader):
    """Of a checkpoint that is not there."""

    def __init__(self, *names):
        self._names = dict.fromkeys((f"model/params/answers/map/{name}" for name in names), None)

    def records(self):
        return self._names


@pytest.mark.catches("any-part-of-a-head-is-a-head")
def test_an_adapter_of_a_head_that_is_there_is_no_new_head():
    """Pairs beside the matrix of a model that has the head already."""
    assert not learned_head(Records("w/down", "w/up", "w/stretch"))
    assert learned_head(Records("w")) and learned_head(Records("w", "b"))


def doubled(answers):
    """Twice what a judge says."""
    return [2 * one.judged for one in answers]


def answering(base, rewarding, folder):
    """A run of two steps that learns from what a judge says."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in PAIRS))
    config = recipe("grpo").replace(model=MODEL, init=str(base / "base"), steps=2)
    config = config.replace(plan=Plan(precision=Precision()))
    path = str(folder / "prompts.jsonl")
    config = changed(config, "data", path=path, seq_len=32, global_batch=8, validation_batches=1)
    config = changed(config, "objective", documents=2, template=str(base / "plain.jinja"))
    judge = str(rewarding / "whole")
    return changed(config, "rollout", judge=judge, group=4, max_tokens=6, workers=1)


@pytest.mark.slow
@pytest.mark.catches("judge-is-no-identity")
def test_which_run_it_is(base, rewarding, tmp_path):
    """A judge by the step of its checkpoint; an objective as runs without margins have it."""
    config = answering(base, rewarding, tmp_path)
    found = task_of(config).identity()
    assert found["rollout.judge"] == [str(rewarding / "whole"), 2]
    assert found["objective"]["margin"] == 1.0
    first = str(rewarding / "whole" / "checkpoints" / "2")
    one = task_of(changed(config, "rollout", judge=first)).identity()
    assert one["rollout.judge"] == [first, 2]
    alone = changed(config, "rollout", judge=None, rewards=f"{__name__}:doubled")
    assert task_of(alone).identity() == {
        **{name: value for name, value in found.items() if name != "rollout.judge"},
        "rollout": {**found["rollout"], "rewards": f"{__name__}:doubled"},
    }


@pytest.mark.slow
@pytest.mark.catches("judge-is-not-told")
def test_a_model_learns_from_what_a_judge_says(base, rewarding, tmp_path):
    """On any mesh; beside a function the judge's number is what that is told."""
    config = answering(base, rewarding, tmp_path)
    found = []
    for mesh, function in (
        ({"fsdp": 8}, None),
        ({"stage": 2, "tensor": 2, "ring": 2}, None),
        ({"fsdp": 8}, f"{__name__}:doubled"),
    ):
        plan = Plan(mesh=mesh, precision=Precision())
        out = tmp_path / f"run{len(found)}"
        ran(changed(config, "rollout", rewards=function).replace(plan=plan), out)
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        found.append([one["reward"] for one in lines if "reward_spread" in one])
    one, other, twice = found
    assert len(one) == 2 and one[0] != 0
    np.testing.assert_allclose(other, one, rtol=1e-4)
    assert twice[0] == pytest.approx(2 * one[0], rel=1e-6)


@pytest.mark.sweep
def test_statements_are_told_from_their_words_in_another_order(tmp_path):
    """One of the five seeds of bench/reward_statements.py."""
    words = (sys.executable, "-m", statements.__name__, str(tmp_path), "400", "0")
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}  # one device
    told = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    final = json.loads(told.stdout.splitlines()[-1])
    assert final["step"] == 400
    assert final["validation_accuracy"] >= 0.95


@pytest.mark.slow
@pytest.mark.catches("what-is-left-out-is-missing")
def test_an_adapter_of_a_model_that_rewards_goes_on(base, rewarding, tmp_path):
    """Its head, which learns, is not read from what it began as."""
    config = config_of(base, adapter=ADAPTER, init=str(rewarding / "whole"), steps=1)
    ran(config, tmp_path / "run")
    ran(config.replace(steps=2), tmp_path / "run", resume=True)
    assert find_checkpoint(str(tmp_path / "run")).step == 2
