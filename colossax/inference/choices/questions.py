"""Questions with choices, answered by how likely a model finds each choice behind its prompt."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from colossax.data import Tokenizer
from colossax.documents import as_kind, parse_json
from colossax.errors import InputError
from colossax.inference.generator import Generation
from colossax.scheduling import EngineRequest, SamplingConfig

FIELDS = {"prompt": str, "choices": list, "answer": int}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One line of a file.

    Attributes:
        prompt: Text that each choice continues; may be empty.
        choices: Two or more texts, as they stand behind it: with the blank that begins a word.
        answer: Which of them is right, counted from 0.
        line: Of the file, counted from 1.
    """

    prompt: str
    choices: tuple[str, ...]
    answer: int
    line: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rating:
    """How often a model finds the right choice the likeliest.

    Attributes:
        questions: How many.
        accuracy: Share of them whose right choice has the highest log-probability.
        accuracy_norm: Likewise of log-probability over characters.
        stderr, stderr_norm: Their standard errors, `sqrt(a (1 - a) / (n - 1))`; 0 of one question.
    """

    questions: int
    accuracy: float
    accuracy_norm: float
    stderr: float
    stderr_norm: float


def read_questions(file: Path) -> list[Question]:
    """Questions of a JSONL file with `prompt`, `choices` and `answer`; empty lines are passed over.

    Raises:
        InputError: It cannot be read, holds none, or naming a line and what is wrong with it.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as problem:
        raise InputError(
            f"FILE: {file} cannot be read ({problem.strerror}); give a JSONL file of questions"
        ) from None
    found = [_question(line, i, file) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"FILE: {file} holds no questions; give one JSON object a line")
    return found


def _question(line: bytes, number: int, file: Path) -> Question:
    where = f"FILE: {file}, line {number}"
    try:
        read = parse_json(line, unique=True)
    except ValueError as problem:
        raise InputError(f"{where}: {problem}; give a JSON object a line") from None
    if set(read) != set(FIELDS):
        raise InputError(
            f"{where}: has the fields {', '.join(sorted(read)) or '(none)'}; give prompt, choices"
            " and answer"
        )
    for name, kind in FIELDS.items():
        try:
            as_kind(read[name], kind, name)
        except ValueError as problem:
            raise InputError(f"{where}: {problem}; repair it") from None
    choices = read["choices"]
    if len(choices) < 2 or not all(isinstance(one, str) and one.strip() for one in choices):
        raise InputError(f"{where}: choices: give two or more texts that are not empty")
    if not 0 <= read["answer"] < len(choices):
        raise InputError(
            f"{where}: answer: found {read['answer']}; give 0 to {len(choices) - 1}, the number of"
            " the right choice"
        )
    return Question(
        prompt=read["prompt"], choices=tuple(choices), answer=read["answer"], line=number
    )


def choice_requests(
    questions: Sequence[Question], tokenizer: Tokenizer, slots: int
) -> list[EngineRequest]:
    """A request for each choice of each question, which scores the choice's tokens alone.

    Tokens are those of prompt and choice together, and blanks at a prompt's end go to the choice,
    as in lm-evaluation-harness. An empty prompt is the token that ends documents, which that takes
    where a tokenizer has none that begins them.

    Args:
        questions: One or more.
        tokenizer: Of the model.
        slots: Longest sequence.

    Raises:
        InputError: A question does not fit, by its line.
    """
    return [_asked(one, text, tokenizer, slots) for one in questions for text in one.choices]


def _asked(question: Question, choice: str, tokenizer: Tokenizer, slots: int) -> EngineRequest:
    before = question.prompt.rstrip()
    whole = tokenizer.encode(question.prompt + choice)
    begin = len(tokenizer.encode(before))
    if not before:
        whole, begin = [tokenizer.eos, *whole], 1
    if len(whole) >= slots:
        raise InputError(
            f"FILE: line {question.line}: prompt and choice are {len(whole)} tokens, and the model"
            f" reads {slots - 1}; shorten it"
        )
    if begin >= len(whole):
        raise InputError(
            f"FILE: line {question.line}: the choice '{choice[:40]}' has no token of its own behind"
            " the prompt; give another"
        )
    sampling = SamplingConfig(logprobs=0)
    return EngineRequest(prompt=tuple(whole), max_tokens=1, score_from=begin, sampling=sampling)


def rated(questions: Sequence[Question], found: Sequence[Generation]) -> Rating:
    """What came of the requests of `choice_requests`, in their order."""
    sums = iter([math.fsum(logprob for logprob, _ in one.scores) for one in found])
    right = right_norm = 0
    for question in questions:
        own = [next(sums) for _ in question.choices]
        # A choice is as long as its words: the blank before them belongs to every choice.
        long = [len(text.lstrip()) for text in question.choices]
        norm = [total / size for total, size in zip(own, long, strict=True)]
        right += own.index(max(own)) == question.answer
        right_norm += norm.index(max(norm)) == question.answer
    count = len(questions)
    accuracy, accuracy_norm = right / count, right_norm / count
    return Rating(
        questions=count,
        accuracy=accuracy,
        accuracy_norm=accuracy_norm,
        stderr=_stderr(accuracy, count),
        stderr_norm=_stderr(accuracy_norm, count),
    )


def _stderr(share: float, count: int) -> float:
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else 0.0
