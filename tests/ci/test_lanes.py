"""Recorded costs decide what the core holds, how lanes are cut, and what a capability may cost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.costs import Budgets, Costs, Meter
from tests.plugins.lanes import core, is_sentinel, part
from tests.plugins.pace import Pace

ROOT = Path(__file__).parents[2]

COSTS = Costs(
    {
        "quick": {
            "tests/a/test_a.py": {"test_both": [4, 2.0], "test_both[dear]": 9.0, "test_dear": 3.0},
            "tests/b/test_b.py": {"test_one": 8.0, "test_other": 4.0},
        },
        "sweep": {"tests/a/test_a.py": {"test_both[dear]": 1.0}},
    }
)


class Item:
    """As much of a collected test as is asked for."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.name = nodeid, nodeid.partition("::")[2]
        self.marks = [mark.mark for mark in marks]

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)


ITEMS = [
    Item("tests/a/test_a.py::test_both[cheap]"),
    Item("tests/a/test_a.py::test_both[dear]"),
    Item("tests/a/test_a.py::test_dear", pytest.mark.sentinel),
    Item("tests/a/test_a.py::test_unlisted"),
    Item("tests/b/test_b.py::test_one"),
    Item("tests/b/test_b.py::test_other"),
]


def names(items):
    return [item.name for item in items]


def test_a_cost_is_a_cases_own_or_its_share_of_the_functions():
    assert [COSTS.of(item) for item in ITEMS] == [0.5, 9.0, 3.0, 0.05, 8.0, 4.0]
    assert COSTS.of(Item("tests/a/test_a.py::test_both[dear]", pytest.mark.sweep)) == 1.0
    assert COSTS.of(Item("tests/a/test_a.py::test_both[cheap]", pytest.mark.slow)) == 5.0


def test_a_case_of_a_sweep_that_nobody_measured_costs_as_such_cases_do():
    assert COSTS.of(Item("tests/a/test_a.py::test_unlisted", pytest.mark.sweep)) == 3.5
    sweep = [Item(f"tests/c/test_{n}.py::test_{n}", pytest.mark.sweep) for n in range(20)]
    sweep.append(Item("tests/a/test_a.py::test_both[dear]", pytest.mark.sweep))
    assert sorted(len(part(sweep, COSTS, n, 3)) for n in (1, 2, 3)) == [7, 7, 7]


def test_the_core_is_what_is_cheap_sentinels_and_one_test_of_every_file():
    assert names(core(ITEMS, COSTS)) == [
        "test_both[cheap]",
        "test_dear",
        "test_unlisted",
        "test_other",
    ]


def test_of_a_file_that_is_all_slow_there_is_none_in_the_core():
    slow = [Item(f"tests/c/test_c.py::test_{n}", pytest.mark.slow) for n in (1, 2)]
    assert core(slow, COSTS) == []


def test_a_sentinel_may_be_one_case_of_many():
    mark = pytest.mark.sentinel("dear")
    cases = [Item(f"tests/c/test_c.py::test_both[{case}]", mark) for case in ("dear", "dearer")]
    assert [is_sentinel(case) for case in cases] == [True, False]
    assert not is_sentinel(Item("tests/c/test_c.py::test_both[dear]"))


def test_parts_are_disjoint_whole_and_of_like_cost():
    parts = [part(ITEMS, COSTS, index, 2) for index in (1, 2)]
    assert sorted(names(parts[0] + parts[1])) == sorted(names(ITEMS))
    sums = [sum(map(COSTS.of, items)) for items in parts]
    assert sums == [pytest.approx(12.5), pytest.approx(12.05)]
    assert {"test_both[cheap]", "test_both[dear]"} <= set(names(parts[0]))


def test_measurements_take_the_place_of_what_was_listed_of_their_tests():
    tests = {"test_both[dear]": 0.4, "test_both[1]": 0.4, "test_new": 2.5, "test_small": 0.1}
    renewed = COSTS.renewed({"quick": {"tests/a/test_a.py": tests}})
    assert renewed.listed["quick"]["tests/a/test_a.py"] == {
        "test_both": [2, 0.8],
        "test_dear": 3.0,
        "test_new": 2.5,
    }
    for lane, file in (("quick", "tests/b/test_b.py"), ("sweep", "tests/a/test_a.py")):
        assert renewed.listed[lane][file] == COSTS.listed[lane][file]


def test_a_folder_without_a_budget_of_its_own_is_a_new_capability():
    budgets = Budgets({"capability": {"core": 60, "rest": 1500}, "train": {"core": 200}})
    assert budgets.over({"train": 190.0, "new": 59.0}, "core") == []
    (sentence,) = budgets.over({"train": 190.0, "new": 61.0}, "core")
    assert sentence.startswith("tests/new took 61 CPU-seconds of the 60 it may cost in the core")
    assert budgets.over({"train": 1600.0}, "rest")


def test_a_run_is_summed_up_by_file_and_folder():
    meter = Meter()
    meter.spent = {
        ("quick", "tests/a/test_a.py::test_x"): 1.0,
        ("aot", "tests/test_b.py::test"): 2.0,
    }
    assert meter.by_folder() == {"a": 1.0, "test_b": 2.0}
    assert meter.by_file()["quick"] == {"tests/a/test_a.py": {"test_x": 1.0}}


def test_a_slow_core_makes_no_test_dear():
    meter = Meter()
    meter.spent, meter.probes = {("quick", "tests/a/test_a.py::test_x"): 3.0}, [1.0, 2.0, 3.0]
    assert meter.by_folder() == {"a": 1.5}


def test_the_pace_is_probed_now_and_then_and_is_of_the_work_that_is_done():
    pace = Pace()
    (first,) = pace.probes()
    assert pace.probes() == []
    assert 0.2 < first < 50


TESTS = """
import time, pytest

@pytest.mark.parametrize("n", range(4))
def test_busy(n):
    until = time.process_time() + 0.4
    while time.process_time() < until: pass
"""


def test_a_run_beyond_its_budget_fails_and_says_so(tmp_path):
    """The plugins themselves, in a tree of one capability with a worker of its own."""
    tests = tmp_path / "tests"
    (tests / "new").mkdir(parents=True)
    (tests / "new" / "test_busy.py").write_text(TESTS)
    (tests / "plugins").symlink_to(ROOT / "tests" / "plugins")
    (tests / "budgets.toml").write_text("[capability]\ncore = 0.1\nrest = 1500\n")
    plugins = ["-pxdist", "-ptests.plugins.costs", "-ptests.plugins.lanes"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    for given, code in ((["--core"], 1), (["--every=4"], 0)):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n1", *plugins, "--hold-budgets", *given, "tests"],
            cwd=tmp_path,
            env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout
        assert ("OVER BUDGET: tests/new took" in done.stdout) == bool(code)
    assert "1 passed" in done.stdout
