"""The questions that come along: what they are, and that the script makes them."""

import collections
import runpy
import sys
from pathlib import Path

import pytest

from colossax.evaluation import read_benchmark
from colossax.evaluation.formats.bundled import FILE

SCRIPT = Path(__file__).parents[2] / "ci/docstrings.py"


def test_they_are_fair():
    items = read_benchmark("docstrings").items
    assert len(items) == 500
    assert collections.Counter(one.answer for one in items) == dict.fromkeys(range(4), 125)
    assert len({one.prompt.text for one in items}) == 500
    for one in items:
        assert len(set(one.choices)) == 4
        assert one.choices[one.answer].split(".")[-1] not in one.prompt.text.split()
    assert items[7].where == "docstrings, line 8"
    assert len(read_benchmark("docstrings", shots=3).items) == 497


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_the_script_makes_as_many_of_any_python():
    script = runpy.run_path(str(SCRIPT))
    made = script["lines"]()
    assert len(made.splitlines()) == 500
    if sys.version_info[:3] == (3, 11, 7):
        assert made == FILE.read_text()
