"""LongBench: long texts with questions, whose prompts come with the benchmark's files."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from colossax.documents import read_json
from colossax.errors import InputError
from colossax.evaluation.answering import AnswerItem, Measure
from colossax.evaluation.formats.files import below, field, lines_of, texts
from colossax.evaluation.items import Prompt
from colossax.evaluation.measures import words

_PLACE = re.compile(r"\{(context|input)\}")
_OF_ONE_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})
_OF_CLASSES = ("trec", "lsht")
_F1, _F1_ZH = words.best("score", words.f1), words.best("score", words.f1, words.characters)
_ROUGE = words.best("score", words.rouge_l, words.plain)
_ROUGE_ZH = words.best("score", words.rouge_l, words.characters)


def _scored(measure: Measure) -> Measure:
    """Its one number by the name that all sets share."""
    return lambda said, answers: {"score": next(iter(measure(said, answers).values()))}


_MEASURES: dict[str, Callable[[Sequence[str]], Measure]] = {
    **dict.fromkeys(
        "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa".split(),
        lambda _: _F1,
    ),
    "multifieldqa_zh": lambda _: _F1_ZH,
    **dict.fromkeys("gov_report qmsum multi_news samsum".split(), lambda _: _ROUGE),
    **dict.fromkeys("dureader vcsum".split(), lambda _: _ROUGE_ZH),
    **dict.fromkeys(_OF_CLASSES, lambda classes: _scored(words.classified(classes))),
    **dict.fromkeys(
        "passage_count passage_retrieval_en passage_retrieval_zh".split(),
        lambda _: _scored(words.numbered),
    ),
    **dict.fromkeys("lcc repobench-p".split(), lambda _: _scored(words.like_code)),
}


def longbench(folder: Path, even: bool) -> Iterator[AnswerItem]:
    """`data/*.jsonl` with `config/dataset2prompt.json` and `dataset2maxlen.json`.

    Names of the files say by what answers are scored. What is too long loses its middle.

    Args:
        folder: That has them.
        even: Whether the files of LongBench-E are read, whose names end in `_e`, or the others.

    Raises:
        InputError: A file is not there, is of no set of LongBench, or by file and line.
    """
    files = below(folder, "*_e.jsonl" if even else "*.jsonl", "LongBench's data", "data")
    files = [one for one in files if one.stem.endswith("_e") == even]
    prompts, most = (_config(folder, f"dataset2{one}.json") for one in ("prompt", "maxlen"))
    for file in files:
        name = file.stem
        known = name.removesuffix("_e")
        if known not in _MEASURES:
            raise InputError(f"{file}: is no set of LongBench; name it as there, or take it away")
        where = f"{folder}: config"
        asks = field(prompts, known, str, where)
        limit = field(most, known, int, where)
        for place, row in lines_of(file, "questions"):
            yield _item(row, place, name, asks, limit)


def _config(folder: Path, name: str) -> dict[str, Any]:
    places = [folder / "config" / name, folder / name]
    file = next((one for one in places if one.is_file()), places[0])
    return read_json(file, remedy="it comes with LongBench, in config/")


def _item(row: Mapping[str, Any], where: str, name: str, asks: str, limit: int) -> AnswerItem:
    row, known = dict(row), name.removesuffix("_e")
    given = {one: field(row, one, str, where) for one in ("context", "input")}
    right = texts(field(row, "answers", list, where), "answers", where)
    named = field(row, "all_classes", list, where) if known in _OF_CLASSES else []
    measure = _MEASURES[known](texts(named, "all_classes", where) if named else ())
    # All at once, as a text may hold what looks like a place itself.
    text = _PLACE.sub(lambda place: given[place[1]], asks)
    return AnswerItem(
        prompt=Prompt(text=text, cut="middle"),
        answers=right,
        measure=_of_one_line(measure) if known in _OF_ONE_LINE else measure,
        max_tokens=limit,
        where=where,
        group=name,
    )


def _of_one_line(measure: Measure) -> Measure:
    return lambda said, answers: measure(words.first_line(said), answers)
