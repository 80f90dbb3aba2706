"""Our own formats: JSONL of questions with choices or answers, and plain texts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colossax.config import check_text
from colossax.data import path_documents
from colossax.errors import InputError
from colossax.evaluation.answering import AnswerItem
from colossax.evaluation.choosing import ChoiceItem
from colossax.evaluation.formats.files import field, lines_of, texts
from colossax.evaluation.items import Prompt
from colossax.evaluation.measures.words import in_words
from colossax.evaluation.passages import PassageItem

MOST_TOKENS = 64
"""Of an answer whose line does not say."""


def choices(file: Path, shots: int) -> Iterator[ChoiceItem]:
    """Of lines `{"prompt", "choices", "answer"}`; `group` may be there.

    Raises:
        InputError: By file and line.
    """
    before: list[str] = []
    for where, row in lines_of(file, "questions"):
        _check_fields(row, where, "prompt choices answer", "group")
        found = texts(field(row, "choices", list, where), "choices", where, least=2)
        right = field(row, "answer", int, where)
        if not 0 <= right < len(found):
            raise InputError(
                f"{where}: answer: found {right}; give 0 to {len(found) - 1}, the number of the"
                " right choice"
            )
        prompt = field(row, "prompt", str, where)
        if len(before) < shots:
            before.append(f"{prompt}{found[right]}\n\n")
            continue
        yield ChoiceItem(
            prompt=Prompt(text=prompt, shots=tuple(before), cut=None),
            choices=found,
            answer=right,
            where=where,
            group=field(row, "group", str, where) if "group" in row else "",
        )


def answers(file: Path, shots: int) -> Iterator[AnswerItem]:
    """Of lines `{"prompt", "answers"}`; `until`, `max_tokens` and `group` may be there.

    An answer ends before the first of the texts in `until`, by default a line's end.

    Raises:
        InputError: By file and line.
    """
    before: list[str] = []
    for where, row in lines_of(file, "questions"):
        _check_fields(row, where, "prompt answers", "until max_tokens group")
        right = texts(field(row, "answers", list, where), "answers", where)
        prompt = field(row, "prompt", str, where)
        most = field(row, "max_tokens", int, where) if "max_tokens" in row else MOST_TOKENS
        if most < 1:
            raise InputError(f"{where}: max_tokens: found {most}; give 1 or more")
        until = field(row, "until", list, where) if "until" in row else ["\n"]
        if not all(isinstance(one, str) and one for one in until):
            raise InputError(f"{where}: until: give texts, none of them empty")
        if len(before) < shots:
            blank = "" if prompt[-1:].isspace() else " "
            before.append(f"{prompt}{blank}{right[0]}\n\n")
            continue
        yield AnswerItem(
            prompt=Prompt(text=prompt, shots=tuple(before), cut=None),
            answers=right,
            measure=in_words,
            max_tokens=most,
            ends=tuple(until),
            where=where,
            group=field(row, "group", str, where) if "group" in row else "",
        )


def _check_fields(row: dict[str, Any], where: str, needed: str, may: str) -> None:
    """Refuse a row that lacks a field, or has one that means nothing."""
    wanted, allowed = set(needed.split()), set(may.split())
    if wanted <= set(row) <= wanted | allowed:
        return
    found, names = ", ".join(sorted(row)) or "(none)", needed.split()
    raise InputError(
        f"{where}: has the fields {found}; give {', '.join(names[:-1])} and {names[-1]}, and at"
        f" most {', '.join(sorted(allowed))}"
    )


def passages(path: Path, context: int) -> Iterator[PassageItem]:
    """Each document of text, JSONL (`text`), Parquet or Arrow files.

    Raises:
        DataError: They cannot be read, or there is none.
    """
    for number, text in enumerate(path_documents(path), 1):
        check_text(text, f"{path}, document {number}")
        yield PassageItem(text=text, where=f"{path}, document {number}", context=context)
