"""What the pages for users show runs as it stands."""

import re
import sys
from pathlib import Path

import grain
import jax
import numpy as np
import pytest

from colossax.checkpoint import Checkpointer
from colossax.cli.options.arguments import Parser, split_overrides
from colossax.cli.train import add_arguments, configure
from colossax.errors import PlanWarning
from colossax.planner.idle import warn_of_idle
from colossax.recipes import OwnTask
from colossax.run.records import read_records

DOCS = Path(__file__).resolve().parent.parent / "docs"


def snippets(page):
    """Python of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def halved(records):
    """Learning rates of steps, and those that the evaluations between them ask for."""
    rates, asked, best = [], [], float("inf")
    for record in records:
        if "held_out_loss" not in record:
            rates.append(record["learning_rate"])
            asked.append(asked[-1] if asked else rates[0])
        elif record["held_out_loss"] < best:
            best = record["held_out_loss"]
        else:
            asked[-1] /= 2
    return rates, asked


@pytest.mark.catches("best-is-the-last")
@pytest.mark.catches("hyperparameter-unchanged")
def test_the_script_around_fit_and_the_callback_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script, own_data, callback = snippets("own_loop.md")[:3]
    scope = {}
    exec(script, scope)
    run, final = tmp_path / "runs" / "classifier", scope["outcome"].final
    assert final["held_out_accuracy"] > 0.8 and str(final["step"]) in capsys.readouterr().out
    told = {"metrics.jsonl", "loss.png", "tensorboard", "checkpoints", "best", "run.json"}
    assert {path.name for path in run.iterdir()} == told
    assert Checkpointer(run / "checkpoints").latest() == final["step"]
    losses = {
        record["step"]: record["held_out_loss"]
        for record in read_records(run / "metrics.jsonl")
        if "held_out_loss" in record
    }
    assert Checkpointer(run / "best").latest() == min(losses, key=losses.get)
    exec(callback, scope)
    rates, asked = halved(read_records(tmp_path / "runs" / "halved" / "metrics.jsonl"))
    # What an evaluation asks for holds from the next step on.
    assert rates[1:] == pytest.approx(asked[:-1], rel=1e-6)
    xs = np.random.default_rng(0).normal(size=(128, 16)).astype(np.float32)
    records = [{"id": str(x), "features": x, "class": int(x[:4].argmax())} for x in xs]
    exec(own_data, {**scope, "grain": grain, "records": records})


def test_a_decoder_with_experts_is_made_as_the_page_says():
    (script,) = snippets("experts.md")
    scope = {}
    exec(script, scope)
    paths = {info.path for info in jax.tree.leaves(scope["step"].spec.infos)}
    assert {"layers/mlp/up", "layers/mlp/router/w"} <= paths


def test_the_step_of_a_student_is_built():
    scope = {}
    exec(snippets("own_loop.md")[-1], scope)
    assert {info.model for info in jax.tree.leaves(scope["step"].infos)} == {"student"}


def test_a_plan_is_found_from_python(capsys):
    own, script = snippets("planning.md")
    scope = {}
    # What compiles for GPUs is not there in every installation.
    exec(own.replace('pins=["tensor=1"])', 'pins=["tensor=1"], verify=False)'), scope)
    assert scope["plan"].mesh.get("tensor", 1) == 1
    assert callable(scope["step"])
    exec(script, {})
    mesh, seconds = capsys.readouterr().out.rsplit(" ", 1)
    assert mesh.startswith("{'")
    assert 0 < float(seconds) < 1


@pytest.mark.catches("idle-unsaid")
def test_a_plain_model_is_warned_of_and_named(capsys):
    found, given = snippets("plain_models.md")
    scope = {}
    with pytest.warns(PlanWarning, match="would split them: words/embedding 'vocab' of 101; name"):
        exec(found, scope)
    exec(given, scope)
    warn_of_idle(scope["step"].bound, scope["step"].spec)  # has nothing to say
    page = (DOCS / "plain_models.md").read_text()
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    for path, *rest in shown:
        row = re.search(rf"^{path} .*$", page, re.MULTILINE)
        assert path.startswith("attn") or row[0].split()[1:] == rest[: len(row[0].split()) - 1]


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """The page's `my_pkg.recipes` in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "recipes.py").write_text(snippets("command_line.md")[0])
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_pkg"]:
        del sys.modules[name]


def lines():
    """The words behind `colossax train` in each line of the page that only trains."""
    text = (DOCS / "command_line.md").read_text()
    found = re.findall(r"^colossax train (.*?) *(?:#.*)?$", text, re.MULTILINE)
    return [words for words in found if not {"--list", "--help"} & {*words.split()}]


@pytest.mark.parametrize("words", lines())
def test_what_the_page_types_is_understood(words, own_package):
    parser = Parser(prog="colossax train", description="")
    add_arguments(parser, "train")
    plain, overrides = split_overrides(words.split())
    config = configure(parser.parse(plain), overrides)
    assert isinstance(config, OwnTask) == ("rolled" in words)
    own = config.config if isinstance(config, OwnTask) else config
    assert own.steps == int((re.findall(r"--steps (\d+)", words) or [own.steps])[0])


def test_the_tests_that_show_what_is_promised_are_there():
    named = re.findall(r"`([a-z_/]+/?test_\w+\.py)`", (DOCS / "reliability.md").read_text())
    assert len(named) > 15
    missing = [name for name in named if not (DOCS.parent / "tests" / name).is_file()]
    assert not missing


@pytest.mark.sweep
def test_the_head_of_the_page_on_encoders_is_trained():
    scope = {}
    (script,) = snippets("encoders.md")
    exec(script, scope)
    assert scope["metrics"]["tokens"] == 16 and np.isfinite(scope["metrics"]["loss"])


@pytest.mark.sweep
def test_the_model_of_the_page_on_images_is_trained():
    scope = {}
    (script,) = snippets("vision.md")
    exec(script, scope)
    assert scope["metrics"]["tokens"] == 8 and np.isfinite(scope["metrics"]["loss"])


@pytest.mark.sweep
def test_the_model_of_the_page_on_sound_is_trained():
    scope = {}
    (script,) = snippets("audio.md")
    exec(script, scope)
    assert scope["metrics"]["tokens"] == 128 and np.isfinite(scope["metrics"]["loss"])


@pytest.mark.sweep
def test_the_model_of_the_page_on_images_and_texts_is_trained():
    scope = {}
    (script,) = snippets("image_text.md")
    exec(script, scope)
    assert np.isfinite(scope["metrics"]["loss"])
    assert 0 <= scope["metrics"]["accuracy"] <= 1


@pytest.mark.sweep
def test_the_model_of_the_page_on_decoders_that_read_images_is_trained():
    scope = {}
    (script,) = snippets("llava.md")
    exec(script, scope)
    # Of 32 targets of each row, 16 are places.
    assert scope["metrics"]["tokens"] == 8 * 16 and np.isfinite(scope["metrics"]["loss"])
    assert int(scope["batch"]["tokens"].max()) == 64 + 15
