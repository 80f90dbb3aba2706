"""Cases of one test of which a quick run takes a part."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def quick_first(
    cases: Iterable[Any], quick: int | Collection[Any], marks: Mapping[Any, Any] = {}
) -> list[Any]:
    """The cases as parameters of a test; those that a quick run leaves out run with `-m sweep`.

    Args:
        cases: Tuples, or values of one argument.
        quick: Those that always run, or a number N for every Nth from the first.
        marks: Further marks, by case.
    """
    cases = list(cases)
    chosen = cases[::quick] if isinstance(quick, int) else list(quick)
    assert chosen and all(case in cases for case in chosen)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[
                *([] if case in chosen else [pytest.mark.sweep]),
                *([marks[case]] if marks and case in marks else []),
            ],
        )
        for case in cases
    ]
