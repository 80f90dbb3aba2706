"""Folders of runs: who may write where, and what may not change."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from colossax.checkpoint import Checkpointer
from colossax.errors import InputError
from colossax.nn import AdapterConfig
from colossax.recipes import RECIPES, recipe
from colossax.run.run_dir import RunFolder, check_identity, find_run_folder
from colossax.tasks.config import train_config_from_json, train_config_to_json
from colossax.tasks.text_task import identity
from tests.checkpoint.support import plain

CONFIG = recipe("llama_tiny")


def who(config=CONFIG, text="t" * 32, tokenizer="k" * 32):
    return identity(config, text=text, tokenizer=tokenizer)


@pytest.fixture
def started(tmp_path):
    """A folder that holds a run."""
    folder = RunFolder(path=tmp_path / "run")
    folder.write(train_config_to_json(CONFIG), who())
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_configuration_survives_json(name):
    config = recipe(name)
    assert train_config_from_json(train_config_to_json(config)) == config


def test_a_damaged_configuration_is_refused(started):
    data = train_config_to_json(CONFIG)
    with pytest.raises(InputError, match="run config: unknown field 'stepz'; did you mean 'steps'"):
        train_config_from_json({**data, "stepz": 3})
    (started.path / "run.json").write_text("{")
    with pytest.raises(InputError, match="run.json: cannot be read"):
        started.config()
    for forged in (
        '{"format": 1}',
        '{"format": 1, "config": [], "identity": {}}',
        "[]",
        "[" * 9**6,
    ):
        (started.path / "run.json").write_text(forged)
        with pytest.raises(InputError, match="run.json: cannot be read .*; restore it from a copy"):
            started.read()
    (started.path / "run.json").write_text('{"format": 9}')
    with pytest.raises(InputError, match="written by another version"):
        started.read()


def changed(folder, old, new):
    text = (folder.path / "run.json").read_text()
    assert text.count(old) == 1
    (folder.path / "run.json").write_text(text.replace(old, new))


@pytest.mark.catches("run-file-unchecked")
def test_a_changed_digit_is_refused(started):
    assert started.config()["optimizer"]["peak_lr"] == 0.003
    layout = json.dumps(json.loads((started.path / "run.json").read_text()))
    (started.path / "run.json").write_text(layout)
    assert started.config()["optimizer"]["peak_lr"] == 0.003, "how it is laid out is no matter"
    for old, new in (('"peak_lr": 0.003', '"peak_lr": 0.005'), ('"crc32": ', '"crc32": 1')):
        started.write(train_config_to_json(CONFIG), who())
        changed(started, old, new)
        with pytest.raises(InputError) as told:
            started.config()
        assert str(told.value) == (
            f"{started.path}/run.json: cannot be read (its checksum does not match: damaged, or"
            " changed by hand); restore it from a copy, or start a new run elsewhere; values are"
            " changed by options, as in --resume --steps 200"
        )
    started.write(train_config_to_json(CONFIG), who())
    changed(started, '"crc32"', '"crc33"')
    with pytest.raises(InputError, match="it holds 'crc33', which we do not write"):
        started.config()


def test_a_file_from_before_there_were_checksums_is_read(started):
    data = json.loads((started.path / "run.json").read_text())
    del data["crc32"]
    (started.path / "run.json").write_text(json.dumps(data))
    assert train_config_from_json(started.config()) == CONFIG


def saved(folder, step, **documents):
    """A checkpoint of no more than its documents."""
    with Checkpointer(folder.checkpoints, keep=None) as checkpointer:
        w = jnp.ones(4)
        checkpointer.save(step, [(plain("model/params/w", w.shape), w)], documents)


@pytest.mark.catches("lost-run-file-is-no-run")
def test_without_the_file_checkpoints_say_what_it_said(started, devices):
    run = {"config": train_config_to_json(CONFIG), "identity": who()}
    saved(started, 1, run={**run, "config": {}})
    saved(started, 2, run=run)
    saved(started, 3, run=run)
    (started.checkpoints / "3" / "run" / "metadata").write_text("{}")
    saved(started, 4, run=[])
    saved(started, 5)
    changed(started, '"peak_lr": 0.003', '"peak_lr": 0.005')
    with pytest.raises(InputError, match="; delete it, and --resume goes on by what the last chec"):
        started.config()
    (started.path / "run.json").unlink()
    found = find_run_folder(str(started.path), recipe="r", resume=True)
    assert train_config_from_json(found.config()) == CONFIG
    check_identity(found, who())
    with pytest.raises(InputError, match="already holds a run"):
        find_run_folder(str(started.path), recipe="r", resume=False)
    shutil.rmtree(started.checkpoints)
    saved(started, 1)
    assert not started.holds_run, "checkpoints of a loop of one's own, or of an import"


def test_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(find_run_folder(None, recipe="r", resume=False).path) == "runs/r-001"
    for name in ("r-001", "r-012", "r-x", "rr-044", "other-099"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert str(find_run_folder(None, recipe="r", resume=False).path) == "runs/r-013"


def test_a_run_is_not_overwritten_and_none_is_not_resumed(started, tmp_path):
    there, empty = str(started.path), str(tmp_path / "empty")
    found = find_run_folder(there, recipe="r", resume=True).config()
    assert train_config_from_json(found) == CONFIG
    assert not find_run_folder(empty, recipe="r", resume=False).path.exists(), "nothing is written"
    for out, resume, message in [
        (there, False, f"--out {there}: already holds a run; continue it with --resume"),
        (empty, True, f"--resume: {empty} holds no run; drop --resume"),
        (None, True, "--resume: which run is not said; name its folder with --out DIR"),
        (str(started.path / "run.json"), False, "is a file; choose a folder"),
    ]:
        with pytest.raises(InputError, match=re.escape(message)):
            find_run_folder(out, recipe="r", resume=resume)


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out .*: cannot be written \(Not a directory\)"):
        RunFolder(path=tmp_path / "file" / "run").write(train_config_to_json(CONFIG), who())


@pytest.mark.catches("resume-other-run")
@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": 3}, "--resume: seed is 0 in {path} and 3 here;"),
        ({"data.global_batch": 12}, "data.global_batch is 24 in {path} and 12 here"),
        ({"data.seq_len": 48}, "data.seq_len is 96 in {path} and 48 here"),
        (
            {"data.validation_fraction": 0.1},
            "data.validation_fraction is 0.02 in {path} and 0.1 here",
        ),
        ({"model.layers": 3}, "model.layers is 4 in {path} and 3 here"),
        ({"optimizer.name": "lamb"}, "optimizer.name is adamw in {path} and lamb here"),
        ({"optimizer.state": "mixed"}, "optimizer.state is float32 in {path} and mixed here"),
    ],
)
def test_another_run_is_not_resumed(started, change, message):
    ((name, value),) = change.items()
    config = CONFIG
    if "." in name:
        part, field = name.split(".")
        config = config.replace(
            **{part: dataclasses.replace(getattr(config, part), **{field: value})}
        )
    else:
        config = config.replace(**change)
    with pytest.raises(InputError, match=re.escape(message.format(path=started.path))):
        check_identity(started, who(config))


@pytest.mark.catches("adapter-before-its-base-was-chosen")
def test_a_run_beside_a_base_of_no_named_form_has_its_own(started):
    config = CONFIG.replace(adapter=AdapterConfig(rank=2))
    stored = who(config)
    later = ("base", "double", "dropout")
    stored["adapter"] = {k: v for k, v in stored["adapter"].items() if k not in later}
    RunFolder(path=started.path).write(train_config_to_json(config), stored)
    check_identity(started, who(config))
    other = config.replace(adapter=AdapterConfig(rank=2, base="nf4"))
    with pytest.raises(InputError, match="adapter.base is own in .* and nf4 here"):
        check_identity(started, who(other))


def test_a_run_without_a_named_state_has_float32(started):
    stored = {k: v for k, v in who().items() if k != "optimizer.state"}
    RunFolder(path=started.path).write(train_config_to_json(CONFIG), stored)
    check_identity(started, who())


@pytest.mark.catches("heads-are-another-run")
def test_a_run_from_before_heads_and_masks_is_the_same_run(tmp_path):
    """The file of one whose families had neither `head` nor `pad`, and whose text no masks."""
    folder = RunFolder(path=tmp_path)
    shutil.copy(Path(__file__).with_name("before_heads.json"), folder.file)
    stored = folder.read()["identity"]
    config = train_config_from_json(folder.config())
    asked = identity(config, text=stored["data"][1], tokenizer=stored["tokenizer"][1])
    check_identity(folder, asked)
    later = ("data.masking", "data.spans", "optimizer.ema")
    assert asked == stored | dict.fromkeys(later, "none")
    assert train_config_to_json(config)["model"] == folder.config()["model"]


def test_other_text_or_another_tokenizer_is_named(started):
    with pytest.raises(InputError, match=r"data is 'the standard library' \(tttttttttttt\) in"):
        check_identity(started, who(text="u" * 32))
    with pytest.raises(InputError, match=r"tokenizer is 'one of 512 tokens' \(kkkkkkkkkkkk\) in"):
        check_identity(started, who(tokenizer="l" * 32))


def test_what_does_not_decide_the_losses_may_change(started):
    moved = dataclasses.replace(CONFIG.data, path="the same text elsewhere", validation_batches=2)
    check_identity(started, who(CONFIG.replace(data=moved, steps=7, keep=9, checkpoint_every=1)))
