"""The examples run, learn, and stay short."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from colossax.cli.options.arguments import Parser, split_overrides
from colossax.cli.train import add_arguments, configure
from colossax.planner.task_step import settle_task, task_step
from colossax.tasks import task_of

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LLAMA = ROOT / "tests" / "golden" / "llama"
TEXT = "def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n\n\n"


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A folder of text, with a cache of its own."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"# file {i}\n{TEXT * 8}")
    return folder


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_has_fewer_than_60_lines(path):
    assert len(path.read_text().splitlines()) < 60


def readme_runs():
    """The words behind `colossax train` in each line of the README that has them.

    Those that begin with another run's checkpoint are tried in tests/cli/test_train.py, recipes of
    one's own in tests/cli/test_own_recipes.py.
    """
    lines = (line.split("#")[0].split() for line in (ROOT / "README.md").read_text().splitlines())
    runs = [line[2:] for line in lines if line[:2] == ["colossax", "train"]]
    return [words for words in runs if "--init" not in words and ":" not in words[0]]


@pytest.mark.parametrize("words", readme_runs(), ids=" ".join)
def test_the_plans_of_the_readme_fit_their_models(words, devices):
    plain, overrides = split_overrides(words)
    parser = Parser(prog="train", description="")
    add_arguments(parser, "train")
    given = parser.parse(plain)
    config = configure(given, overrides)
    task, used = task_of(config), devices[: given.devices or 1]
    step = task_step(task, settle_task(task, config.plan, used), used)
    assert step.bound.mesh.size == (given.devices or 1)
    step.order(config.data.seq_len)


def test_there_are_five_examples():
    assert len(list(EXAMPLES.glob("*.py"))) == 5


def test_train_from_scratch(text, capsys):
    losses = load("train_from_scratch").main(str(text), steps=30)
    assert losses[-1] < losses[0] - 1.0
    assert "def " in capsys.readouterr().out


def test_finetune(text, tmp_path, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(LLAMA, folder)
    write_tokenizer(folder)
    arguments = [str(folder), str(tmp_path / "checkpoint"), str(text)]
    losses = load("finetune").main(*arguments, steps=12)
    assert losses[-1] < losses[0] - 0.3
    # The checkpoint is there already and the start is the imported model's, whatever the mesh.
    again = load("finetune").main(*arguments, steps=1)
    assert again[0] == pytest.approx(losses[0], rel=1e-6)


def test_finetune_offload(text, tmp_path, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(LLAMA, folder)
    write_tokenizer(folder)
    arguments = [str(folder), str(tmp_path / "checkpoint"), str(text)]
    example = load("finetune_offload")
    whole = example.main(*arguments, device_gb=1.0, steps=3)
    line = capsys.readouterr().out.splitlines()[0]
    assert "parameters of 2, optimizer of 2" in line, line
    needed_mb = float(line.split(" MB of a device")[0].split()[-1])
    losses = example.main(*arguments, device_gb=0.9 * needed_mb / 1e3, steps=12)
    line = capsys.readouterr().out.splitlines()[0]
    assert "parameters of 2, optimizer of 2" not in line, line
    assert losses[:3] == pytest.approx(whole, rel=1e-6)
    assert losses[-1] < losses[0] - 0.3


def write_tokenizer(folder):
    """A tokenizer of single characters, small enough for the golden model's vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {c: i for i, c in enumerate(characters, start=len(vocab))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    assert json.loads((folder / "config.json").read_text())["vocab_size"] >= len(vocab)


def test_own_model(capsys):
    losses = load("own_model").main(steps=60)
    assert losses[-1] < losses[0] / 4
    assert "mean error" in capsys.readouterr().out


def test_own_model_gives_the_same_losses_on_one_device():
    """As a user starts it: a process of its own, no test settings."""
    script = (
        "import runpy, json; example = runpy.run_path('examples/own_model.py');"
        "print(json.dumps(example['main'](5)))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    alone = json.loads(done.stdout.splitlines()[-1])
    assert len(jax.devices()) == 8
    assert load("own_model").main(5) == pytest.approx(alone, rel=1e-4)
