"""The walks that the design page describes: every file is there, knows the next, rooms go down."""

import ast
import re
import tomllib
from pathlib import Path

import colossax

PACKAGE = Path(colossax.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "design" / "core.md").read_text(encoding="utf-8")
TO_A_MATMUL = re.findall(r"^\| `([\w/]+\.py)` \|.*\| (.+) \|$", PAGE, re.MULTILINE)
LONGEST = 15
"""Files on the way to a matmul."""


def rank(file):
    """How high the room of a file stands; 0 is the highest."""
    layers = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    order = [re.findall(r"\w+", level) for level in layers["contracts"][0]["layers"]]
    return next(i for i, rooms in enumerate(order) if file.split("/")[0] in rooms)


def rooms_imported(file):
    """Rooms and files that a file imports from, `nn` and `nn/stack` alike."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [node.module or "" for node in nodes]
    return {name.removeprefix("colossax.").replace(".", "/") for name in names}


def test_the_walk_to_a_matmul_is_as_the_page_says():
    assert 1 < len(TO_A_MATMUL) <= LONGEST
    for (file, calls), (following, _) in zip(TO_A_MATMUL, TO_A_MATMUL[1:], strict=False):
        assert (PACKAGE / file).is_file() and (PACKAGE / following).is_file()
        handed_down = "*" in calls
        assert handed_down or rank(file) <= rank(following), f"{file} calls up, {following}"


def test_each_file_of_the_walk_imports_the_next_or_its_protocol():
    protocols = {  # who is called through a value: where the two know one another from
        ("run/loop.py", "step/step.py"): ("run/run.py", "step/step"),
        ("step/step.py", "step/updaters.py"): ("step/choosing.py", "step/updaters"),
        ("step/updaters.py", "step/gradients/accumulate.py"): (
            "step/choosing.py",
            "step/gradients/accumulate",
        ),
        ("step/loss.py", "tasks/next_token.py"): ("tasks/text_task.py", "tasks/next_token"),
        ("tasks/next_token.py", "nn/decoder.py"): ("models/registry.py", "nn"),
        ("layerwise/runs.py", "nn/block.py"): ("nn/decoder.py", "nn/block"),
        ("nn/block.py", "nn/layers.py"): ("nn/decoder.py", "nn/layers"),
    }
    files = [file for file, _ in TO_A_MATMUL]
    for pair in zip(files, files[1:], strict=False):
        importer, module = protocols.get(pair, (pair[0], pair[1].removesuffix(".py")))
        found = rooms_imported(importer)
        assert module in found or module.split("/")[0] in found, pair


def test_a_plan_reaches_a_sharded_array_in_few_files():
    line = PAGE[PAGE.index("And from a plan in JSON") :].split("\n\n")[0]
    files = re.findall(r"`([\w/]+\.py)`", line)
    assert 1 < len(files) <= 5
    assert all((PACKAGE / file).is_file() for file in files)
    named = re.findall(r"`(?:Plan\.)?(\w+)`", line)
    text = "".join((PACKAGE / file).read_text(encoding="utf-8") for file in files)
    assert named and all(f"def {name}" in text for name in named)
