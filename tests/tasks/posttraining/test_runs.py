"""Runs on conversations: any mesh, resumed, packed or not; what they keep and what they refuse."""

import argparse
import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from colossax.checkpoint import find_checkpoint
from colossax.cli.serving.engine import _facts
from colossax.config import BatchConfig, Plan, Precision
from colossax.data import Chat, Tokenizer
from colossax.data.chats.template import PLAIN
from colossax.errors import CheckpointError, DataError, InputError
from colossax.inference import open_checkpoint
from colossax.models import LlamaConfig, maker
from colossax.nn import AdapterConfig
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.planner.task_step import settle_task, task_step
from colossax.processes.group import Group
from colossax.recipes import recipe
from colossax.run import RunConfig, RunOptions, train
from colossax.run.origins import origins_of
from colossax.tasks import MaskConfig, ObjectiveConfig, PolicyConfig, next_token_loss, task_of
from colossax.tasks.config import train_config_from_json, train_config_to_json
from colossax.tasks.posttraining.config import deciding
from tests.launching import metrics
from tests.serve.fake import CHATML, TOKENIZER
from tests.tasks.posttraining.random_model import write_random
from tests.tasks.small_text import changed, ran

MODEL = LlamaConfig(
    vocab=272, embed=32, layers=2, heads=4, kv_heads=2, mlp=64, max_seq=256, init_std=0.1
)
MESHES = [{"fsdp": 2, "tensor": 2, "ring": 2}, {"data": 4, "ulysses": 2}]


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def sums(*, of):
    """Questions of small numbers: answered, answered twice, or judged."""
    for a in range(of):
        for b in range(of):
            question, right = f"{a}+{b}?", f"{a + b}"
            wrong = "?" * (1 + a % 3)
            yield question, right, wrong


RECORDS = {
    "sft": [{"prompt": q, "completion": right} for q, right, _ in sums(of=6)],
    "dpo": [{"prompt": q, "chosen": right, "rejected": wrong} for q, right, wrong in sums(of=6)],
    "kto": [
        {"prompt": q, "completion": answer, "label": good}
        for q, right, wrong in sums(of=5)
        for answer, good in ((right, True), (wrong, False))
    ],
}
RECORDS |= dict.fromkeys(("reward", "ipo", "simpo", "orpo"), RECORDS["dpo"])
RECORDS["distill"] = RECORDS["sft"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of a random model, with a tokenizer of bytes and no template."""
    folder = tmp_path_factory.mktemp("base")
    write_random(MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """One of a larger model, with that tokenizer."""
    larger = dataclasses.replace(MODEL, layers=4, embed=64)
    return write_random(larger, tmp_path_factory.mktemp("teacher"), seed=2)


@pytest.fixture
def given(base, teacher, tmp_path):
    """`config_of`, with a teacher for what learns from one; or with a reference of its own."""

    def made(name):
        name, _, form = name.partition(", ")
        config = config_of(name, base, tmp_path)
        if name == "distill":
            config = changed(config, "objective", teacher=str(teacher), text=0.25)
        return config.replace(adapter=AdapterConfig()) if form == "whole" else config

    return made


def started(task=None):
    """A step of the model on one device, or of a task."""
    devices = jax.devices()[:1]
    if task is None:
        return build_step(maker(MODEL), adamw(1e-3), next_token_loss(), Plan(), devices=devices)
    return task_step(task, settle_task(task, Plan(), devices), devices)


def config_of(name, base, folder, **data):
    """A recipe's run of six steps on its records."""
    config = recipe(name).replace(model=MODEL, init=str(base), steps=6, validate_every=3)
    config = config.replace(checkpoint_every=3, plan=Plan(precision=Precision()))
    path = written(folder / f"{name}.jsonl", RECORDS[name])
    sizes = {"seq_len": 96, "global_batch": 8, "validation_fraction": 0.2, **data}
    config = changed(config, "data", path=path, **sizes)
    return changed(config, "optimizer", peak_lr=3e-3, warmup=1, schedule_steps=6)


def losses(folder):
    return np.array([[loss or 0, held_out or 0] for _, loss, held_out in metrics(folder)])


@pytest.mark.slow
@pytest.mark.catches("reference-begins-random")
@pytest.mark.catches("whole-model-is-its-own-reference")
@pytest.mark.catches("teacher-of-the-students-size")
@pytest.mark.parametrize(
    "name", ["sft", "distill", "reward", "dpo", "dpo, whole", "kto", "kto, whole"]
)
def test_a_run_resumed_on_other_meshes_is_one_that_nobody_touched(name, given, tmp_path):
    config = given(name)
    final = ran(config, tmp_path / "whole")
    beside = name == "distill" or name.endswith("whole")
    for number, mesh in enumerate([{"stage": 2, "fsdp": 4}, MESHES[1]] if beside else MESHES):
        plan = Plan(mesh=mesh, batch=BatchConfig(accumulation=1 + number))
        part = config.replace(steps=3 * number + 3, plan=plan)
        ran(part, tmp_path / "parts", resume="auto")
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    np.testing.assert_allclose(parts, whole, rtol=5e-5, atol=1e-6)
    assert whole[-1, 0] < whole[0, 0]
    if name not in ("sft", "distill"):
        assert 0 <= final["validation_accuracy"] <= 1
    if name.startswith("dpo"):
        assert whole[0, 0] == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.catches("answers-see-their-neighbours")
@pytest.mark.parametrize("name", ["sft", "simpo"])
def test_packed_rows_are_rows_of_their_own(name, base, tmp_path):
    """What is held out has one loss, whether its examples share rows or not."""
    found = []
    for packing in ("packed", "whole"):
        config = config_of(name, base, tmp_path, packing=packing, validation_batches=9)
        task = task_of(config)
        step = started(task)
        state = step.init(seed=1)
        found.append(task.evaluated(step, state)["validation_loss"])
        told = task.introduction()[0]
        if packing == "whole":
            count = int(told.split()[1])
            assert f"in {count:,} rows" in told
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_what_ends_answers_is_kept(base, tmp_path):
    """The special tokens of a template, beside the one that ends documents."""
    (tmp_path / "chatml.jinja").write_text(CHATML)
    config = changed(
        config_of("sft", base, tmp_path), "objective", template=str(tmp_path / "chatml.jinja")
    )
    chat = Chat.from_json(task_of(config).documents()["chat"])
    assert chat == Chat(template=CHATML, ends=(TOKENIZER.specials["<|im_end|>"],))


@pytest.mark.catches("adapters-talk-as-their-base")
def test_an_adapter_is_served_with_its_own_template_and_is_no_reference(base, tmp_path):
    config = config_of("sft", base, tmp_path).replace(steps=1, adapter=AdapterConfig(rank=2))
    ran(config, tmp_path / "adapted")
    stored = open_checkpoint(tmp_path / "adapted")
    words = {"slots": None, "name": None, "seats": 4, "chat_template": None, "keeps": None}
    facts = _facts(argparse.Namespace(**words), stored)
    assert facts["chat_template"] == PLAIN  # of the adapter: its base has none
    config = config_of("dpo", base, tmp_path).replace(init=str(tmp_path / "adapted"))
    with pytest.raises(InputError, match="is an adapter, and without it the model is not what dpo"):
        task_of(config).identity()


@pytest.mark.catches("chat-is-not-kept")
def test_what_a_checkpoint_keeps(base, tmp_path):
    ran(config_of("sft", base, tmp_path).replace(steps=1), tmp_path / "run")
    found = find_checkpoint(str(tmp_path / "run"))
    assert Chat.from_json(found.document("chat", dict)) == Chat(template=PLAIN)
    assert json.loads(found.document("tokenizer", str)) == json.loads(TOKENIZER.to_json())


@pytest.mark.catches("objective-is-no-identity")
def test_which_run_it_is(base, tmp_path):
    config = config_of("dpo", base, tmp_path)
    one, other = (
        task_of(changed(config, "objective", beta=beta)).identity() for beta in (0.1, 0.3)
    )
    assert task_of(config).identity() == one
    assert one["objective"]["beta"] == 0.1 and other["objective"]["beta"] == 0.3
    assert train_config_from_json(train_config_to_json(config)) == config


def test_what_is_told_of_the_data(base, tmp_path):
    long = [*RECORDS["dpo"], {"prompt": "x" * 90, "chosen": "a", "rejected": "b"}]
    config = config_of("dpo", base, tmp_path)
    config = changed(config, "data", path=written(tmp_path / "long.jsonl", long))
    (line,) = task_of(config).introduction()
    assert "pairs in " in line and "1 left out as they are longer than a row" in line
    mixture = {config.data.path: 3.0, written(tmp_path / "other.jsonl", RECORDS["dpo"]): 1.0}
    lines = task_of(changed(config, "data", path=None, mixture=mixture)).introduction()
    assert [line.split(":")[1].strip() for line in lines] == [
        "75.0% long.jsonl",
        "25.0% other.jsonl",
    ]


def test_flops_count_every_pass(base, tmp_path):
    sizes, tokens = MODEL.decoder(), 8 * 96
    per_token = sizes.train_flops_per_token(96)
    frozen = sizes.train_flops_per_token(96, frozen=True)
    wanted = {"sft": per_token, "orpo": per_token, "dpo": frozen + per_token / 3}
    wanted["kto"] = frozen + per_token
    vocabulary = 6 * MODEL.vocab * MODEL.embed
    wanted["reward"] = per_token - vocabulary
    for name, each in wanted.items():
        assert task_of(config_of(name, base, tmp_path)).flops == int(each * tokens)


def other(**changes):
    return lambda config: config.replace(**changes)


REFUSED = {
    "a teacher of sft": (
        "sft",
        lambda config: changed(config, "objective", teacher="larger"),
        "objective.teacher: is of distill, which learns from another model",
    ),
    "a coefficient of distill": (
        "distill",
        lambda config: changed(config, "objective", beta=0.5),
        "objective.beta: distill has none",
    ),
    "masking": (
        "sft",
        lambda config: changed(config, "data", masking=MaskConfig()),
        "objective.name: found sft beside data.masking",
    ),
    "encoder": ("sft", other(model=recipe("bert_stdlib").model), "is of decoders, whose text goes"),
    "z loss": ("orpo", other(z_loss=1e-4), "found orpo beside z_loss"),
}


@pytest.mark.parametrize("slip", REFUSED)
def test_what_does_not_go_together_is_refused(slip):
    name, change, told = REFUSED[slip]
    with pytest.raises(InputError, match=told):
        change(recipe(name))


def test_a_configuration_is_checked():
    with pytest.raises(InputError, match="objective.name: unknown 'dpoo'; did you mean 'dpo'"):
        ObjectiveConfig(name="dpoo")
    with pytest.raises(InputError, match="objective.documents: found 3, and dpo has pairs"):
        ObjectiveConfig(name="dpo", documents=3)


def test_files_that_do_not_do_are_refused(base, tmp_path):
    config = config_of("dpo", base, tmp_path)
    with pytest.raises(InputError, match="data.path: dpo learns from conversations; give a file"):
        task_of(changed(config, "data", path=None)).identity()
    path = written(tmp_path / "half.jsonl", [{"prompt": "a", "chosen": "b"}])
    with pytest.raises(DataError, match=r"half\.jsonl, line 1: has no field 'rejected'"):
        task_of(changed(config, "data", path=path)).identity()
    with pytest.raises(InputError, match="objective.template: .*none.jinja cannot be read"):
        task_of(changed(config, "objective", template=str(tmp_path / "none.jinja"))).identity()
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(InputError, match="give another with --objective.template FILE"):
        task_of(changed(config, "objective", template=str(tmp_path / "bad.jinja"))).identity()


@pytest.mark.catches("another-teacher-is-no-other-run")
@pytest.mark.catches("teacher-learns")
@pytest.mark.catches("teacher-of-other-tokens")
def test_a_teacher_is_a_whole_model_with_the_tokenizer_of_the_student(
    given, base, teacher, tmp_path
):
    config = given("distill")
    path, number = task_of(config).identity()["teacher"]
    assert path == str(teacher) and number > 1000

    def refused(match, path):
        with pytest.raises(InputError, match=match):
            task_of(changed(config, "objective", teacher=path)).identity()

    refused("objective.teacher: distill learns from what another model would say; name", None)
    ran(given("sft").replace(steps=1, adapter=AdapterConfig(rank=2)), tmp_path / "adapted")
    refused("objective.teacher: .* is an adapter; give the whole", str(tmp_path / "adapted"))
    with pytest.raises(CheckpointError, match="objective.teacher: .*nowhere' does not exist"):
        task_of(changed(config, "objective", teacher=str(tmp_path / "nowhere")))
    wider = write_random(dataclasses.replace(MODEL, vocab=280), tmp_path / "wider")
    refused("reads 280 tokens and the model that learns 272; give one", str(wider))
    other = Tokenizer.from_json(TOKENIZER.to_json().replace("<|im_end|>", "<|im_stop|>"))
    reads = write_random(MODEL, tmp_path / "reads", tokenizer=other)
    refused("objective.teacher: .* has another tokenizer than the model that learns", str(reads))
    task = task_of(config.replace(init=None))
    with pytest.raises(InputError, match="init: distill teaches a model that is there"):
        task.identity()
    ran(config.replace(steps=1), tmp_path / "run")
    found = find_checkpoint(str(tmp_path / "run"))
    assert not any(name.startswith("teacher/") for name in found.records())
    assert open_checkpoint(tmp_path / "run").model == MODEL


def test_flops_of_a_teacher_are_its_forward_pass(given, teacher):
    config = given("distill")
    larger = open_checkpoint(teacher).model.decoder()
    per_token = MODEL.decoder().train_flops_per_token(96) + larger.train_flops_per_token(96) / 3
    assert task_of(config).flops == int(per_token * 8 * 96)


@pytest.mark.slow
@pytest.mark.catches("frozen-may-begin-random")
@pytest.mark.catches("frozen-beside-is-a-base")
@pytest.mark.catches("teacher-is-the-base-of-an-adapter")
@pytest.mark.catches("no-adapter-beside-a-teacher")
def test_an_adapter_learns_from_a_teacher_and_is_kept_as_one_of_its_base(given, base, tmp_path):
    config = given("distill").replace(steps=1)
    ran(config, tmp_path / "whole")
    assert find_checkpoint(str(tmp_path / "whole")).document("base", dict) is None
    adapted = config.replace(adapter=AdapterConfig(rank=2))
    ran(adapted, tmp_path / "adapted")
    ran(adapted.replace(steps=2), tmp_path / "adapted", resume=True)
    found = open_checkpoint(tmp_path / "adapted")
    assert found.step == 2 and found.adapter.rank == 2
    assert Path(found.base[0].directory) == base
    names = {"only": {"teacher": str(base)}, "model": {"model": str(base)}}
    for init, missing in ((names["only"], "'model'"), (names["model"], "'teacher'")):
        with pytest.raises(InputError, match=f"all or a part of {missing} is frozen, and it"):
            train(
                task_of(adapted),
                RunConfig(steps=1, init=init),
                RunOptions(out=str(tmp_path / "no"), trackers=("json",)),
                Group(None, {}),
            )


OBJECTIVE = {"name", "beta", "margin", "desirable", "undesirable", "documents", "template"}
POLICY = {"clip_low", "clip_high", "dual_clip", "divergence", "estimator", "normaliser"}
POLICY |= {"longest", "temperature"}


@pytest.mark.catches("settings-of-others-decide")
def test_what_tells_a_run_knows_nothing_of_other_objectives():
    """A run that was begun before there were others goes on."""
    for name, more in (("sft", set()), ("dpo", set()), ("distill", {"temperature", "text"})):
        assert deciding(ObjectiveConfig(name=name), name).keys() == OBJECTIVE | more
    own = {"value", "value_clip", "discount", "decay", "whitened"}
    for name, more in (("grpo", set()), ("ppo", own)):
        assert deciding(PolicyConfig(), name).keys() == POLICY | more


@pytest.mark.slow
def test_another_frozen_model_is_another_run_and_one_that_moved_is_not(given, teacher, tmp_path):
    moved = tmp_path / "here"
    shutil.copytree(teacher, moved)
    config = changed(given("distill").replace(steps=1), "objective", teacher=str(moved))
    ran(config, tmp_path / "run")
    moved.rename(tmp_path / "there")
    config = changed(config.replace(steps=2), "objective", teacher=str(tmp_path / "there"))
    ran(config, tmp_path / "run", resume=True)
    write_random(dataclasses.replace(MODEL, layers=4, embed=64), moved, seed=5)
    other = changed(config.replace(steps=3), "objective", teacher=str(moved))
    with pytest.raises(InputError, match="teacher is "):
        ran(other, tmp_path / "run", resume=True)
    whole = given("dpo, whole").replace(steps=1)
    ran(whole, tmp_path / "dpo")
    other = write_random(MODEL, tmp_path / "other", seed=7)
    with pytest.raises(InputError, match="reference is "):
        ran(whole.replace(steps=2, init=str(other)), tmp_path / "dpo", resume=True)


def test_a_base_is_named_beside_a_teacher(given, base, teacher, tmp_path):
    ran(given("sft").replace(steps=1, adapter=AdapterConfig(rank=2)), tmp_path / "adapted")
    init = {"model": str(tmp_path / "adapted"), "teacher": str(teacher)}
    found = origins_of(init, ("model", "teacher"), base=str(base))
    assert found["model"].base is not None and found["teacher"].base is None
    with pytest.raises(InputError, match="is of a whole model and no adapter; leave base out"):
        origins_of({"teacher": str(teacher)}, ("teacher",), base=str(base))
