"""Recipes of one's own, from modules and files; the list of recipes; `--resume=auto`."""

import contextlib
import dataclasses
import io
import itertools
import json

import pytest

from colossax.cli import main
from colossax.cli.options.arguments import Parser, split_overrides
from colossax.cli.train import add_arguments, configure
from colossax.recipes import RECIPES, OwnTask, recipe
from colossax.tasks.config import train_config_to_json
from tests.run.test_fit import losses

MODULE = """
import itertools, jax, numpy as np, optax
from colossax.config import Plan
from colossax.recipes import recipe
from colossax.run import RunConfig
from colossax.tasks import Task
from tests.run.test_task import toy

def config():
    return recipe("llama_tiny").replace(recipe="mine", steps=7)

def task():
    return toy()

def pair():
    return toy(), RunConfig(steps=3, plan=Plan(mesh={"fsdp": 2}))

def shapeless():
    return toy(shapes={})

def fails():
    return {}["nothing"]

def other():
    return 7

def needs(this):
    return config()
"""

numbers = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working folder, by a name that no other test has."""
    monkeypatch.chdir(tmp_path)
    name = f"my_recipes_{next(numbers)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import os\nos.no_such_thing\n")
    (tmp_path / f"{name}_lacking.py").write_text("import no_such_library\n")
    return name


def colossax(*words):
    """Run `colossax`; gives (exit code, standard output, standard error)."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(list(words))
    return code, out.getvalue(), errors.getvalue()


def configured(*words):
    parser = Parser(prog="colossax train", description="")
    add_arguments(parser, "train")
    plain, overrides = split_overrides(words)
    return configure(parser.parse(plain), overrides)


@pytest.mark.catches("own-recipe-not-overridden")
def test_a_function_gives_a_configuration_a_task_or_a_task_with_how_it_runs(module):
    config = configured(f"{module}:config", "--data.seq_len=64", "--steps=9")
    assert config == recipe("llama_tiny").replace(
        recipe="mine", steps=9, data=dataclasses.replace(config.data, seq_len=64)
    )
    one = configured(f"{module}:task", "--steps=5", "--plan.mesh=fsdp=4", "--init=there")
    assert isinstance(one, OwnTask) and one.task.name == "toy"
    assert one.config.steps == 5 and one.config.plan.mesh == {"fsdp": 4}
    assert one.config.init == "there"
    two = configured(f"{module}:pair", "--keep=5")
    assert (two.config.steps, two.config.keep, two.config.plan.mesh) == (3, 5, {"fsdp": 2})


def test_a_task_is_trained_and_resumed_by_its_name(module, tmp_path, devices):
    out = tmp_path / "run"
    words = ("train", f"{module}:pair", "--devices=2", f"--out={out}")
    code, _, errors = colossax(*words, "--steps=2", "--resume=auto")
    assert code == 0, errors
    code, _, errors = colossax("train", "--resume", f"--out={out}", "--devices=2")
    assert code == 2 and f"--resume: {out} holds a run of a task of your own; name it" in errors
    code, lines, errors = colossax(*words, "--resume=auto", "--json")
    assert code == 0 and "resumed from step 2" in errors, errors
    assert [json.loads(line).get("step") for line in lines.splitlines()] == [3, None]
    assert sorted(losses(out)) == [1, 2, 3]
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    code, lines, errors = colossax(*words, "--resume=auto", "--json")
    assert code == 0 and "is finished (its 3 steps are done); nothing is changed" in errors
    assert json.loads(lines)["final"]["step"] == 3
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files


@pytest.mark.catches("bare-resume-takes-a-word")
def test_resume_takes_a_value_by_its_sign_alone(tmp_path):
    parser = Parser(prog="colossax train", description="")
    add_arguments(parser, "train")
    asked = parser.parse(["--resume", "llama_tiny", "--out=x"])
    assert (asked.resume, asked.recipe) == (True, "llama_tiny")
    assert parser.parse(["--resume=auto"]).resume == "auto"
    assert parser.parse([]).resume is False
    assert colossax("train", "--resume=maybe")[::2] == (
        2, "colossax: argument --resume: found 'maybe'; give --resume alone, or --resume=auto;"
        " see colossax train --help\n",
    )  # fmt: skip
    assert "--resume: which run is not said" in colossax("train", "--resume=auto")[2]


MISTAKES = {
    ":task": "gives a task and not how many steps it trains; add --steps N",
    ":confog": "has no 'confog'; did you mean 'config'?",
    ":fails": "py:22 with KeyError: 'nothing'",
    ":other": "gives a int; return a colossax.tasks.TrainConfig",
    ":needs": "with TypeError: needs() missing 1 required positional argument: 'this'",
    ":": "write it package.module:function",
    "_broken:mine": "_broken.py:2 with AttributeError: module 'os' has no attribute",
    "_lacking:mine": "_lacking.py:1 with ModuleNotFoundError: No module named 'no_such_library'",
    "_none:mine": "there is no module 'my_recipes_",
}


@pytest.mark.parametrize("ending", MISTAKES)
def test_what_is_wrong_with_a_recipe_is_said_in_one_sentence(module, ending):
    code, out, errors = colossax("train", f"{module}{ending}")
    assert (code, out) == (2, "") and errors.startswith("colossax: recipe my_recipes_")
    assert MISTAKES[ending] in errors and errors.count("\n") == 1


FILES = {
    "part.json": (
        '{"recipe": "llama_tiny", "steps": 9, "data": {"seq_len": 64},'
        ' "plan": {"mesh": {"fsdp": 2}}}'
    ),
    "part.toml": 'recipe = "llama_tiny"\nsteps = 9\n[data]\nseq_len = 64\n[plan.mesh]\nfsdp = 2\n',
}


@pytest.mark.catches("config-file-replaces-all")
def test_a_file_is_a_recipe_whole_or_in_part(tmp_path):
    expected = configured("llama_tiny", "--steps=9", "--data.seq_len=64", "--plan.mesh=fsdp=2")
    whole = {"format": 1, "config": train_config_to_json(expected), "identity": {}}
    for name, text in {**FILES, "run.json": json.dumps(whole)}.items():
        (tmp_path / name).write_text(text)
        assert configured(f"--config={tmp_path / name}") == expected, name
    shorter = configured(f"--config={tmp_path / 'part.toml'}", "--steps=2")
    assert shorter == expected.replace(steps=2)


FILE_MISTAKES = {
    "a.yaml": ("", "is neither .json nor .toml"),
    "b.json": ("{", "is no JSON: Expecting property name"),
    "c.toml": ("steps = ", "is no TOML: Invalid value"),
    "d.json": ('{"steps": 3}', "has neither a whole model nor a recipe"),
    "e.json": ('{"recipe": "llama_tiny", "data": {"seqlen": 3}}', "data: unknown field 'seqlen'"),
    "f.json": ('{"recipe": "llama_tony"}', "no recipe is called 'llama_tony'"),
    "g.json": ('{"recipe": "llama_tiny", "steps": "many"}', "steps"),
}


@pytest.mark.parametrize("name", FILE_MISTAKES)
def test_what_is_wrong_with_a_file_is_said_in_one_sentence(tmp_path, name):
    text, sentence = FILE_MISTAKES[name]
    (tmp_path / name).write_text(text)
    for verb in ("train", "inspect"):
        code, out, errors = colossax(verb, f"--config={tmp_path / name}")
        assert (code, out) == (2, "") and sentence in errors and errors.count("\n") == 1


@pytest.mark.parametrize("verb", ["train", "inspect"])
def test_the_recipes_are_listed_with_a_line_each(verb):
    code, out, _ = colossax(verb, "--list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(RECIPES)
    assert "llama_tiny    Under a million parameters" in out
    code, out, _ = colossax(verb, "--list", "--json")
    listed = [json.loads(line) for line in out.splitlines()]
    assert [one["recipe"] for one in listed] == list(RECIPES) and all(x["summary"] for x in listed)


@pytest.mark.catches("inspect-takes-any-target-for-a-task")
def test_inspect_takes_one_recipe_and_of_a_task_a_target(module):
    assert "name one recipe, or give --config FILE" in colossax("inspect")[2]
    errors = colossax("inspect", f"{module}:task")[2]
    assert f"inspect: {module}:task gives a task, which names no GPUs to compile for" in errors
    errors = colossax("inspect", f"{module}:task", "--target=h100:1x8", "--compare-layouts")[2]
    assert f"--compare-layouts: {module}:task gives a task, and layouts are compared" in errors
    errors = colossax("inspect", f"{module}:task", "--target=h100:1x8", "--plan.mush=1")[2]
    assert "mush" in errors and errors.startswith("colossax: ") and errors.count("\n") == 1
    errors = colossax("inspect", f"{module}:shapeless", "--target=h100:1x8")[2]
    assert "task 'toy': its shapes are empty, and a step is compiled for the shapes" in errors
