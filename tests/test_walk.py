"""The walks that the design page describes: files that a call goes through, rooms that go down."""

import json
import re
import tomllib
import traceback
from pathlib import Path

import jax.numpy as jnp
import pytest

import colossax
from colossax.cli.main import main

PACKAGE = Path(colossax.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "design" / "core.md").read_text(encoding="utf-8")
TO_A_MATMUL = re.findall(r"^\| `([\w/]+\.py)` \|.*\| (.+) \|$", PAGE, re.MULTILINE)
LONGEST = 10
"""Files on the way to a matmul."""


def rank(file):
    """How high the room of a file stands; 0 is the highest."""
    layers = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    order = [re.findall(r"\w+", level) for level in layers["contracts"][0]["layers"]]
    return next(i for i, rooms in enumerate(order) if file.split("/")[0] in rooms)


def files_called():
    """Files of the package whose functions are being called, from the outermost, each once."""
    called = [Path(frame.filename) for frame in traceback.extract_stack()]
    own = [file.relative_to(PACKAGE) for file in called if file.is_relative_to(PACKAGE)]
    return [str(file) for file in dict.fromkeys(own)]


@pytest.fixture
def walks(monkeypatch, tmp_path):
    """The ways from `colossax train` to the matmuls of a layer, as they were gone."""
    seen, dot = [], jnp.dot

    def watched(*args, **kwargs):
        seen.append(files_called())
        return dot(*args, **kwargs)

    monkeypatch.setattr(jnp, "dot", watched)
    never = ("--checkpoint-every", "0", "--validate-every", "0")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "a b c d " * 50}) + "\n" for _ in range(40)))
    data = ("--data", str(text), "--out", str(tmp_path / "run"))
    assert main(["train", "llama_tiny", "--steps", "1", *never, *data]) == 0
    return [walk for walk in seen if "nn/block.py" in walk]


def test_the_walk_to_a_matmul_is_as_the_page_says(walks):
    told = [file for file, _ in TO_A_MATMUL]
    assert 1 < len(told) <= LONGEST
    assert told in [walk[walk.index("cli/train.py") :] for walk in walks]


def test_no_call_of_the_walk_goes_up():
    for (file, calls), (following, _) in zip(TO_A_MATMUL, TO_A_MATMUL[1:], strict=False):
        handed_down = "*" in calls
        assert handed_down or rank(file) <= rank(following), f"{file} calls up, {following}"


def test_a_plan_reaches_a_sharded_array_in_few_files():
    line = PAGE[PAGE.index("And from a plan in JSON") :].split("\n\n")[0]
    files = re.findall(r"`([\w/]+\.py)`", line)
    assert 1 < len(files) <= 5
    assert all((PACKAGE / file).is_file() for file in files)
    named = re.findall(r"`(?:Plan\.)?(\w+)`", line)
    text = "".join((PACKAGE / file).read_text(encoding="utf-8") for file in files)
    assert named and all(f"def {name}" in text for name in named)
