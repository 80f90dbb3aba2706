"""MMLU and C-Eval: CSV files of questions with four choices, whose letters are scored."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from colossax.config import check_text
from colossax.documents import read_json
from colossax.errors import InputError
from colossax.evaluation.choosing import ChoiceItem
from colossax.evaluation.formats.files import below, examples, rows_of
from colossax.evaluation.items import Prompt

LETTERS = ("A", "B", "C", "D")
COLUMNS = ("question", *LETTERS, "answer")

_ENGLISH, _CHINESE = "Answer:", "答案："  # noqa: RUF001 (its colon is Chinese)


class _Row(NamedTuple):
    """A question.

    Attributes:
        where: It stands.
        text: The question with its choices, up to what asks for a letter.
        answer: The right letter.
    """

    where: str
    text: str
    answer: str


def mmlu(folder: Path, shots: int) -> Iterator[ChoiceItem]:
    """The files of MMLU's archive: `test/*_test.csv`, examples from `dev/*_dev.csv`.

    Rows are question, four choices and a letter, without names of columns. The prompt is that of
    lm-evaluation-harness.

    Raises:
        InputError: There are no such files, or by file and line.
    """
    for file in below(folder, "*_test.csv", "MMLU's test files", "test", "data/test"):
        subject = file.name.removesuffix("_test.csv")
        about = subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {about}.\n\n"
        rows, before = _rows(file, _ENGLISH), file.parent.parent / "dev" / f"{subject}_dev.csv"
        yield from _items(rows, head, subject, _shots(before, shots, _ENGLISH))


def ceval(folder: Path, shots: int) -> Iterator[ChoiceItem]:
    """C-Eval's `val/*_val.csv`, whose answers are known, examples from `dev/*_dev.csv`.

    Columns have names. Subjects are named in Chinese where the benchmark's `subject_mapping.json`
    lies in the folder, else as the files are.

    Raises:
        InputError: There are no such files, or by file and line.
    """
    files = below(folder, "*_val.csv", "C-Eval's validation files", "val", "data/val")
    names = _subjects(folder / "subject_mapping.json")
    for file in files:
        subject = file.name.removesuffix("_val.csv")
        about = names.get(subject, subject.replace("_", " "))
        head = f"以下是中国关于{about}的单项选择题，请选出其中的正确答案。\n\n"  # noqa: RUF001 (likewise)
        before = file.parent.parent / "dev" / f"{subject}_dev.csv"
        rows = _rows(file, _CHINESE, named=True)
        yield from _items(rows, head, subject, _shots(before, shots, _CHINESE, named=True))


def _subjects(file: Path) -> dict[str, str]:
    if not file.is_file():
        return {}
    read = read_json(file, remedy="repair it, or take it away")
    for name, known in read.items():
        if not isinstance(known, list) or len(known) < 2 or not isinstance(known[1], str):
            raise InputError(
                f"{file}: {name}: give a list of an English and a Chinese name, or take it away"
            )
    return {name: known[1] for name, known in read.items()}


def _items(
    rows: Iterator[_Row], head: str, subject: str, shots: tuple[str, ...]
) -> Iterator[ChoiceItem]:
    for row in rows:
        yield ChoiceItem(
            prompt=Prompt(head=head, shots=shots, text=row.text),
            choices=tuple(f" {letter}" for letter in LETTERS),
            answer=LETTERS.index(row.answer),
            where=row.where,
            group=subject,
        )


def _shots(file: Path, shots: int, asks: str, *, named: bool = False) -> tuple[str, ...]:
    rows = _rows(file, asks, named=named)
    return examples((f"{row.text} {row.answer}\n\n" for row in rows), shots, file)


def _rows(file: Path, asks: str, *, named: bool = False) -> Iterator[_Row]:
    rows = rows_of(file, "questions with four choices")
    columns = list(next(rows, ("", ()))[1]) if named else list(COLUMNS)
    if missing := [one for one in COLUMNS if one not in columns]:
        raise InputError(
            f"{file}: has no column {missing[0]}; give {', '.join(COLUMNS)} in its first line"
        )
    for where, row in rows:
        if len(row) != len(columns):
            raise InputError(
                f"{where}: has {len(row)} columns; give {len(columns)}: {', '.join(columns)}"
            )
        known = dict(zip(columns, row, strict=True))
        for name in COLUMNS:
            check_text(known[name], f"{where}: {name}")
        if (answer := known["answer"].strip()) not in LETTERS:
            raise InputError(f"{where}: answer: found '{answer[:40]}'; give A, B, C or D")
        choices = "".join(f"{letter}. {known[letter]}\n" for letter in LETTERS)
        yield _Row(where, f"{known['question'].strip()}\n{choices}{asks}", answer)
