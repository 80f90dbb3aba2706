"""Benchmarks by the words that name them: `mmlu=FOLDER`, `docstrings`."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from colossax.config import user_path
from colossax.errors import InputError
from colossax.evaluation.benchmark import Benchmark
from colossax.evaluation.formats.bundled import docstrings
from colossax.evaluation.formats.lettered import ceval, mmlu
from colossax.evaluation.formats.longbench import longbench
from colossax.evaluation.formats.own import answers, choices, passages
from colossax.evaluation.formats.problems import gsm8k, mathematics
from colossax.evaluation.items import Item


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of benchmark.

    Attributes:
        read: Items of a path and so many examples before each.
        metric: See `Benchmark`.
        shots: Examples where nobody says how many; None: it has none.
        what: The path is, for people; None: there is none.
        groups_alike: See `Benchmark`.
        own: Whether there may be several of the kind, which their paths tell apart.
    """

    read: Callable[[Path, int], Iterator[Item]]
    metric: str
    shots: int | None = 0
    what: str | None = None
    own: bool = False
    groups_alike: bool = False


def formats(context: int = 1) -> dict[str, Format]:
    """All of them by name.

    Args:
        context: Of each window of a text; see `PassageItem`.
    """
    return {
        "docstrings": Format(read=lambda _, shots: docstrings(shots), metric="accuracy"),
        "mmlu": Format(read=mmlu, metric="accuracy", shots=5, what="its folder, with test and dev"),
        "ceval": Format(read=ceval, metric="accuracy", shots=5, what="its folder, val and dev"),
        "gsm8k": Format(
            read=gsm8k, metric="exact_match", shots=5, what="its folder, test.jsonl and train.jsonl"
        ),
        "math": Format(
            read=mathematics, metric="exact_match", shots=4, what="its folder, test and train"
        ),
        "longbench": Format(
            read=lambda path, _: longbench(path, even=False),
            metric="score",
            shots=None,
            what="its folder, data and config",
            groups_alike=True,
        ),
        "longbench_e": Format(
            read=lambda path, _: longbench(path, even=True),
            metric="score",
            shots=None,
            what="LongBench's folder, data and config",
            groups_alike=True,
        ),
        "choices": Format(
            read=choices, metric="accuracy", what="JSONL of prompt, choices and answer", own=True
        ),
        "answers": Format(
            read=answers, metric="exact_match", what="JSONL of prompt and answers", own=True
        ),
        "text": Format(
            read=lambda path, _: passages(path, context),
            metric="bits_per_byte",
            shots=None,
            what="text, JSONL, Parquet or Arrow, whose perplexity is told",
            own=True,
        ),
    }


def read_benchmark(
    word: str,
    *,
    shots: int | None = None,
    limit: int | None = None,
    context: int = 1,
    option: str = "--tasks",
) -> Benchmark:
    """The benchmark that a word names.

    Args:
        word: `NAME` or `NAME=PATH`.
        shots: Examples before each item; None: as many as is usual for it.
        limit: Most items of each group; None: all.
        context: Of windows of text; see `PassageItem`.
        option: What the word was given for, for messages.

    Raises:
        InputError: There is no such benchmark, or its files are not as they should be.
    """
    name, given, place = word.partition("=")
    known = formats(context)
    if (form := known.get(name)) is None:
        raise InputError(f"{option}: there is no '{name}'; give one of {', '.join(known)}")
    if form.what is None and given:
        raise InputError(f"{option}: {name} comes with colossax; leave '={place}' out")
    if form.what is not None and not place:
        raise InputError(f"{option}: {name} needs a path, {form.what}; give {name}=PATH")
    path = user_path(place, f"{option} {name}") if place else Path()
    items = tuple(_limited(form.read(path, _shots(form, shots)), limit))
    if not items:
        raise InputError(f"{option}: {word} holds no questions; give more than the examples")
    name = f"{name}:{place}" if form.own else name
    return Benchmark(name=name, items=items, metric=form.metric, groups_alike=form.groups_alike)


def _shots(form: Format, asked: int | None) -> int:
    if form.shots is None:
        return 0
    return form.shots if asked is None else asked


def _limited(items: Iterator[Item], limit: int | None) -> Iterator[Item]:
    if limit is None:
        yield from items
        return
    taken = Counter[str]()
    for item in items:
        taken[item.group] += 1
        if taken[item.group] <= limit:
            yield item
