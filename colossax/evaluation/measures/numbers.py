"""Answers that are numbers or formulas: what of a text is the answer, and whether two are equal."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_ANY = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^{\s])")
_FINAL = (re.compile(r"answer is:?\s*", re.IGNORECASE), re.compile(r"answer:\s*", re.IGNORECASE))
_SENTENCE = re.compile(r"\.(?=\s|$)|\n")
_COMMAND = re.compile(r"\\(left|right|!|,|;|:|quad|qquad|displaystyle)(?![a-zA-Z])|\\[ $%]|[$%]")
_UNITS = re.compile(r"\\(?:text|mbox|mathrm)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_DECIMAL = re.compile(r"-?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})")
_FRACTION = re.compile(
    r"(-?)\\frac\{(-?[0-9]{1,40})\}\{(-?[0-9]{1,40})\}|(-?[0-9]{1,40})/(-?[0-9]{1,40})"
)
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?:[^0-9]|$))")


def marked_number(text: str) -> str | None:
    """What stands behind `####`, as GSM8K's solutions end; None where nothing does."""
    found = _MARKED.search(text)
    return None if found is None else _number(found[1])


def last_number(text: str) -> str | None:
    """The last number of a text; None where there is none."""
    found = _ANY.findall(text)
    return _number(found[-1]) if found else None


def _number(text: str) -> str:
    return re.sub(r"[$,]", "", text).removesuffix(".")


def of_school(said: str, answers: Sequence[str]) -> Mapping[str, float]:
    """GSM8K's: `exact_match` of what stands behind `####`, `exact_match_last` of the last number.

    They are the strict and the flexible match of lm-evaluation-harness: equal as texts.
    """
    marked, last = marked_number(said), last_number(said)
    return {
        "exact_match": float(marked is not None and marked in answers),
        "exact_match_last": float(last is not None and last in answers),
    }


def final_formula(text: str) -> str | None:
    """The answer of a solution: what its last box holds, else what is said to be the answer.

    None where there is neither.
    """
    boxes = list(_BOXED.finditer(text))
    if boxes:
        last = boxes[-1]
        return _braced(text, last.end()) if last[1] == "{" else last[1]
    found = next((found for one in _FINAL if (found := list(one.finditer(text)))), [])
    return _sentence(text[found[-1].end() :]) if found else None


def _sentence(text: str) -> str:
    """What it begins with: a formula between dollars, else all up to the end of the sentence."""
    if text.startswith("$") and "$" in text[1:]:
        return text[1:].partition("$")[0].strip()
    return _SENTENCE.split(text, maxsplit=1)[0].lstrip("$").strip()


def _braced(text: str, begin: int) -> str | None:
    """What stands up to the brace that closes one before `begin`; None where none does."""
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None


def same_formula(one: str, other: str) -> bool:
    """Whether two formulas are the same once spelt alike, or the same number."""
    one, other = _spelt(one), _spelt(other)
    if one == other:
        return True
    values = _value(one), _value(other)
    return values[0] is not None and values[0] == values[1]


def _spelt(formula: str) -> str:
    """Without what changes nothing: blanks, sizes of brackets, units, signs of money."""
    text = _COMMAND.sub("", formula.strip().rstrip("."))
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = _UNITS.sub(
        lambda unit: "" if 0 < unit.start() and unit.end() == len(unit.string) else unit[1], text
    )
    text = re.sub(r"\^\{?\\circ\}?", "", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _THOUSANDS.sub("", re.sub(r"\s+", "", text))
    name, sign, value = text.partition("=")
    return value if sign and len(name) == 1 else text


def _value(text: str) -> Fraction | None:
    """The number that it is; None where it is none."""
    found = _FRACTION.fullmatch(text)
    try:
        if found is None:
            return Fraction(text) if _DECIMAL.fullmatch(text) else None
        sign, over, under, plain_over, plain_under = found.groups()
        value = Fraction(int(over or plain_over), int(under or plain_under))
    except (ValueError, ZeroDivisionError):
        return None
    return -value if sign else value


def of_mathematics(said: str, answers: Sequence[str]) -> Mapping[str, float]:
    """MATH's: `exact_match` of the last box's formula, by `same_formula`."""
    found = final_formula(said)
    right = found is not None and any(same_formula(found, one) for one in answers)
    return {"exact_match": float(right)}
