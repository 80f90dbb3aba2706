"""GSM8K and MATH: problems with worked solutions, of which the final answers are compared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colossax.documents import read_json
from colossax.errors import InputError
from colossax.evaluation.answering import AnswerItem
from colossax.evaluation.formats.files import below, examples, field, lines_of
from colossax.evaluation.items import Prompt
from colossax.evaluation.measures.numbers import (
    final_formula,
    marked_number,
    of_mathematics,
    of_school,
)

_TRAINED = "train.jsonl"

SCHOOL_TOKENS, MATHEMATICS_TOKENS = 256, 512
"""Of a solution at most."""


def gsm8k(path: Path, shots: int) -> Iterator[AnswerItem]:
    """`test.jsonl` of a folder, or a file like it: lines of `question` and `answer`.

    Examples are the first of `train.jsonl` beside it. Solutions end in `#### 18`.

    Raises:
        InputError: By file and line.
    """
    file = below(path, "test.jsonl", "GSM8K's test.jsonl")[0] if path.is_dir() else path
    if shots and file.name == _TRAINED:
        raise InputError(
            f"{file}: the examples come from it, so they would be asked too; give --shots 0"
        )
    trained = file.parent / _TRAINED
    solved = (
        f"{_asked(row, where)} {field(row, 'answer', str, where)}\n\n"
        for where, row in lines_of(trained, "problems")
    )
    before = examples(solved, shots, trained)
    for where, row in lines_of(file, "problems"):
        right = marked_number(field(row, "answer", str, where))
        if right is None:
            raise InputError(f"{where}: answer: does not end in #### and a number; repair it")
        yield AnswerItem(
            prompt=Prompt(text=_asked(row, where), shots=before),
            answers=(right,),
            measure=of_school,
            max_tokens=SCHOOL_TOKENS,
            ends=("Question:", "</s>", "<|im_end|>"),
            where=where,
        )


def _asked(row: dict[str, Any], where: str) -> str:
    return f"Question: {field(row, 'question', str, where)}\nAnswer:"


def mathematics(folder: Path, shots: int) -> Iterator[AnswerItem]:
    """MATH's `test/<subject>/*.json`: each `problem` and `solution`, whose answer is boxed.

    Examples are the first of each of `train/<subject>` in turn.

    Raises:
        InputError: There are no such files, or by file.
    """
    files = below(folder, "*/*.json", "MATH's test folders", "test")
    trained = folder / "train"
    solved = (
        _solved(str(file), _problem(file)) for file in _spread(sorted(trained.glob("*/*.json")))
    )
    before = examples(solved, shots, trained)
    for file in files:
        where, row = str(file), _problem(file)
        right = final_formula(field(row, "solution", str, where))
        if right is None:
            raise InputError(f"{where}: solution: has no \\boxed answer; repair it")
        yield AnswerItem(
            prompt=Prompt(text=_posed(row, where), shots=before),
            answers=(right,),
            measure=of_mathematics,
            max_tokens=MATHEMATICS_TOKENS,
            ends=("Problem:",),
            where=where,
            group=file.parent.name,
        )


def _problem(file: Path) -> dict[str, Any]:
    return read_json(file, remedy="give a problem and its solution as JSON")


def _solved(where: str, row: dict[str, Any]) -> str:
    return f"{_posed(row, where)} {field(row, 'solution', str, where)}\n\n"


def _posed(row: dict[str, Any], where: str) -> str:
    return f"Problem: {field(row, 'problem', str, where)}\nSolution:"


def _spread(files: list[Path]) -> list[Path]:
    """The first of each folder, then the second of each, and so on."""
    count: dict[Path, int] = {}
    order = []
    for file in files:
        count[file.parent] = count.get(file.parent, 0) + 1
        order.append((count[file.parent], file))
    return [file for _, file in sorted(order)]
