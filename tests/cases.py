"""Cases of one test of which a quick run takes a part."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def quick_first(cases: Iterable[Any], quick: int | Collection[Any] | Callable) -> list[Any]:
    """The cases as parameters of a test; those that a quick run leaves out run with `-m sweep`.

    Args:
        cases: Tuples, or values of one argument.
        quick: Which ones always run: every so manieth from the first, those in a collection, or
            those for which a function says so.
    """
    found = []
    for number, case in enumerate(cases):
        if isinstance(quick, int):
            runs = number % quick == 0
        else:
            runs = quick(case) if callable(quick) else case in quick
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=[] if runs else [pytest.mark.sweep]))
    assert any(not one.marks for one in found), "a quick run would see none of them"
    return found
