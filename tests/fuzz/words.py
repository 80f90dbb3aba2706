"""Hostile words: numbers for every option, recipes and plans as files, output that fails."""

import dataclasses
import errno
import io
import json
import math
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colossax.cli.options.arguments import Parser, split_overrides
from colossax.cli.options.overrides import override_names
from colossax.cli.train import DESCRIPTION, add_arguments, configure
from colossax.config import Plan
from colossax.recipes import recipe
from colossax.tasks import train_config_from_json
from colossax.tasks.config import train_config_to_json
from tests.fuzz import base as truth
from tests.fuzz.base import Base
from tests.fuzz.damage import BYTES, dumped, mutated
from tests.fuzz.judge import Outcome, Verdict, called, commanded, judged, wrong

Case = tuple[str, Verdict]

NUMBERS = (
    *("nan", "-nan", "inf", "-inf", "NaN", "1e999", "-1e999", "0", "-0.0", "-1", "-5", "1e-400"),
    *("1_0", "0x10", "1e3", "1,5", "٣", "½", "", " ", "none", "true", "[1]", "{}", "1.0", "0.5"),
    *("9" * 25, "9" * 400, "9" * 5000, "2147483648", "18446744073709551616", "--1", "+1", "1 2"),
)


def of_options(_base: Base, rng: random.Random, _place: Path) -> Case:
    """A number for any option or dotted value: refused, or a value that can be meant."""
    config = recipe(rng.choice(("llama_tiny", "finetune", "gpt2_124m", "llama3_8b")))
    names = [name for name, _ in override_names(config)]
    chosen = [(rng.choice(names), rng.choice(NUMBERS)) for _ in range(rng.choice((1, 1, 2)))]
    words = [f"--{name.replace('_', '-') if '.' not in name else name}={x}" for name, x in chosen]
    done = called(lambda: _configured([config.recipe, *words]))
    named = (*(name.split(".")[-1] for name, _ in chosen), *(f"'{x}'" for _, x in chosen))
    return " ".join(words)[:300], judged(done, names=named, good=_meant)


def of_recipes(_base: Base, rng: random.Random, place: Path) -> Case:
    """A recipe in JSON or TOML with a value changed, or bytes of it."""
    document, said = mutated(_document(rng), rng)
    path = place / rng.choice(("mine.json", "mine.json", "mine.toml"))
    path.write_bytes(dumped(document, rng) if path.suffix == ".json" else _toml(document))
    if rng.random() < 0.2:
        said += f", {rng.choice(BYTES)(path, rng, [])}"
    done = called(lambda: _configured(["--config", str(path)]))
    return f"{path.name}: {said}", judged(done, good=_meant)


def of_plans(_base: Base, rng: random.Random, _place: Path) -> Case:
    """A plan's JSON, and that of a whole configuration."""
    whole = train_config_to_json(recipe(rng.choice(("llama_tiny", "llama3_8b"))))
    alone = rng.random() < 0.5
    document, said = mutated(whole["plan"] if alone else whole, rng)
    text = dumped(document, rng).decode(errors="surrogateescape")
    if alone:
        return f"plan: {said}", judged(called(lambda: Plan.from_json(text)), good=_meant)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = json.loads(json.dumps(document))
    done = called(lambda: train_config_from_json(document))
    return f"configuration: {said}", judged(done, good=_meant)


def of_commands(base: Base, rng: random.Random, place: Path) -> Case:
    """Words for `generate`, `export` and `import` that nobody meant."""
    run, strange = str(base.run), ("", "\0", "a\udcff", "~nouser", "x" * 5000, "/dev/null")
    words = rng.choice(
        (
            ("generate", run, f"--prompt={rng.choice((*strange, 'the cat'))}", "--max-tokens=2"),
            ("generate", run, "--prompt=a", f"--max-tokens={rng.choice(NUMBERS)}"),
            ("generate", run, "--prompt=a", f"--temperature={rng.choice(NUMBERS)}"),
            ("generate", run, "--prompt=a", f"--step={rng.choice(NUMBERS)}"),
            ("generate", run, "--prompt=a", f"--seed={rng.choice(NUMBERS)}"),
            ("generate", run, f"--prompt-tokens={rng.choice(NUMBERS)},1", "--max-tokens=2"),
            ("generate", rng.choice(strange), "--prompt=a"),
            ("generate", run, "--prompt=a", f"--plan.mesh=fsdp={rng.choice(NUMBERS)}"),
            ("export", run, rng.choice(strange)),
            ("export", run, str(place / "hf"), f"--step={rng.choice(NUMBERS)}"),
            ("export", run, str(place / "hf"), f"--max-shard-gb={rng.choice(NUMBERS)}"),
            ("import", rng.choice(strange), str(place / "out")),
            ("import", str(base.hf), rng.choice(strange)),
            ("train", "llama_tiny", f"--devices={rng.choice(NUMBERS)}", "--steps=nan"),
        )
    )
    os.chdir(place)
    return " ".join(map(repr, words))[:300], judged(commanded(*words), good=_went_well)


class Failing(io.StringIO):
    """A stream that takes some characters, and then fails as pipes and disks do."""

    def __init__(self, room: int, problem: BaseException):
        super().__init__()
        self._room, self._problem = room, problem

    def write(self, text: str) -> int:
        """Take it, or fail."""
        self._room -= len(text)
        if self._room < 0:
            raise self._problem
        return super().write(text)


def of_streams(base: Base, rng: random.Random, place: Path) -> Case:
    """Standard output or standard error that goes away: no traceback, nothing lost."""
    problem = rng.choice(
        (
            BrokenPipeError(errno.EPIPE, "Broken pipe"),
            OSError(errno.ENOSPC, "No space left on device"),
            ValueError("I/O operation on closed file."),
        )
    )
    which, room = rng.choice(("stdout", "stderr")), rng.choice((0, 0, 1, 20, 200))
    words = rng.choice(
        (
            ("generate", str(base.run), *truth.PROMPT),
            ("export", str(base.run), str(place / "hf"), "--json"),
            ("train", "--list"),
            ("--help",),
            ("train", "nobody"),
        )
    )

    def run() -> int:
        from colossax.cli import main

        setattr(sys, which, Failing(room, problem))
        return main(list(words))

    done = called(run)
    said = f"{words[0]} {words[-1]}: {which} fails after {room}: {problem}"
    if done.fault is None and done.value == 2:
        return said, Verdict(name="refused")
    return said, judged(done, good=_went_well_or_1)


def _went_well(done: Outcome) -> Verdict:
    if done.value == 0:
        return Verdict(name="accepted")
    return wrong(f"exit code {done.value}: {done.said[-300:]}")


def _went_well_or_1(done: Outcome) -> Verdict:
    return Verdict(name="accepted") if done.value in (0, 1) else _went_well(done)


def _configured(words: list[str]) -> Any:
    parser = Parser(prog="colossax train", description=DESCRIPTION["train"])
    add_arguments(parser, "train")
    plain, overrides = split_overrides(words)
    return configure(parser.parse(plain), overrides)


def _document(rng: random.Random) -> Any:
    short = {
        "recipe": "llama_tiny",
        "steps": 10,
        "optimizer": {"peak_lr": 0.001, "warmup": 2},
        "data": {"seq_len": 32},
        "plan": {"mesh": {"fsdp": 2}},
    }
    return short if rng.random() < 0.5 else train_config_to_json(recipe("llama_tiny"))


def _toml(document: Any) -> bytes:
    """Of an object of plain values and objects; other things as JSON, which TOML mostly is not."""
    if not isinstance(document, dict):
        return json.dumps(document).encode()
    return "".join(
        f"{json.dumps(name)} = {_toml_value(value)}\n" for name, value in document.items()
    ).encode()


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value)


def _meant(done: Outcome) -> Verdict:
    """Of what was taken: all its numbers are finite, and sizes are sizes."""
    for name, value in _numbers(done.value):
        if not math.isfinite(value):
            return wrong(f"{name} is {value}")
        if value < 0 and name not in ("count", "seed"):
            return wrong(f"{name} is {value}")
    return Verdict(name="accepted")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), field.name)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _numbers(one, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
