"""Make the questions of the benchmark `docstrings`: which function does a sentence describe?

    python ci/docstrings.py            the file's lines on standard output
    python ci/docstrings.py --write    into colossax/evaluation/formats/docstrings.jsonl

Of the public functions of Python's standard library that are written in Python, those whose first
sentence names neither them nor their module; nothing is imported. Another version of Python gives
other questions.
"""

import ast
import hashlib
import json
import re
import sys
import sysconfig
from pathlib import Path

FILE = Path(__file__).parents[1] / "colossax/evaluation/formats/docstrings.jsonl"
COUNT, CHOICES = 500, 4
SHORTEST, LONGEST = 20, 200
NO_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


def functions():
    """`module.name` of each public function to the first sentence of its docstring."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if NO_LIBRARY.intersection(parts) or any(part.startswith("_") for part in parts):
            continue
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                sentence = described(node, parts[-1])
                if sentence is not None:
                    found[".".join((*parts, node.name))] = sentence
    return found


def described(node, module):
    """Its docstring's first sentence, where that names neither it nor its module."""
    told = (ast.get_docstring(node) or "").split("\n\n")[0]
    sentence = re.split(r"(?<=[.!?])\s", " ".join(told.split()))[0]
    words = set(re.findall(r"[a-z0-9]+", sentence.lower()))
    names = set(re.findall(r"[a-z0-9]+", node.name.lower()))
    plain = sentence.isascii() and sentence[:1].isupper() and sentence.endswith(".")
    named = names <= words or module in words
    if plain and SHORTEST <= len(sentence) <= LONGEST and not named:
        return sentence
    return None


def order(text):
    """A place that a text has however many others there are."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def questions(known):
    """One for each of the first functions in that order, with others of its module first."""
    by_sentence = {sentence: name for name, sentence in reversed(known.items())}
    once = {name: sentence for sentence, name in by_sentence.items()}
    for i, name in enumerate(sorted(once, key=order)[:COUNT]):
        module = name.rpartition(".")[0]
        others = sorted(
            (other for other in once if other != name),
            key=lambda other: (other.rpartition(".")[0] != module, order(name + other)),
        )[: CHOICES - 1]
        choices = sorted(others, key=lambda other: order(other + name))
        choices.insert(i % CHOICES, name)
        yield {
            "prompt": f"Which function does this describe?\n{once[name]}\nAnswer:",
            "choices": [f" {one}" for one in choices],
            "answer": i % CHOICES,
        }


def lines():
    """The file."""
    return "".join(f"{json.dumps(one)}\n" for one in questions(functions()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(lines(), encoding="utf-8")
    elif sys.argv[1:]:
        sys.exit("give --write or nothing")
    else:
        sys.stdout.write(lines())
