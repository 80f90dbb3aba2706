"""What tests cost, in seconds of CPU time: told after each run, kept in `tests/costs.json`.

A test's cost is the CPU time of its worker and of the children it waited for, fixtures included,
by the pace of this run (`pace.py`): wall time, and seconds of a slow core, would say more of the
machine than of the test. `make costs` renews the list.
"""

import json
import os
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.plugins.pace import Pace, pace_of

FILE = Path(__file__).parents[1] / "costs.json"
BUDGETS = FILE.with_name("budgets.toml")
DEAR_S = 1.0
"""Tests above this are not in the core (`lanes.py`)."""

SLOW_S = 5.0
"""What the mark `slow` stands for at least. The first test that needs a shared fixture pays for it,
so the others of a dear one look cheap, and have to carry the mark."""

UNLISTED_S = {"quick": 0.05}
ELSEWHERE_S = 3.5
"""What an unlisted case costs: in a lane whose list is renewed before each landing next to nothing,
in the others as much as the 935 of a part of the sweep did (3.4 seconds each)."""

SMALL_S = 0.5
"""Functions whose cheap cases take less than this together are not listed."""

_PROPERTY = "cpu_s"
_SHOWN = 5


def lane_of(item):
    """Where a test belongs: `gpu`, `aot`, `outside`, `sweep` or `quick`."""
    marks = ("gpu", "aot", "outside", "sweep")
    return next((m for m in marks if item.get_closest_marker(m)), "quick")


class Costs:
    """The recorded list: by lane and file, seconds of each dear case and, as a pair with their
    number, of the cheap cases of a function."""

    def __init__(self, listed):
        self.listed = listed

    @classmethod
    def read(cls):
        """The list of this tree."""
        return cls(json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {})

    def of(self, item):
        """Seconds of one test, listed or by what such tests cost."""
        slow = item.get_closest_marker("slow") is not None
        return max(self._listed(item), SLOW_S if slow else 0.0)

    def _listed(self, item):
        file, _, name = item.nodeid.partition("::")
        lane = lane_of(item)
        listed = self.listed.get(lane, {}).get(file, {})
        unlisted = UNLISTED_S.get(lane, ELSEWHERE_S)
        found = listed.get(name, listed.get(function_of(name), unlisted))
        return found[1] / found[0] if isinstance(found, list) else found

    def is_dear(self, item):
        """Whether a test is too dear for the core."""
        return self.of(item) > DEAR_S

    def renewed(self, measured):
        """The list with new measurements in place of the old ones of the same tests."""
        lanes = {lane: dict(files) for lane, files in self.listed.items()}
        for lane, files in measured.items():
            for file, tests in files.items():
                known = lanes.setdefault(lane, {}).get(file, {})
                kept = {name: value for name, value in known.items() if name not in tests}
                lanes[lane][file] = dict(sorted((kept | _listed(tests)).items()))
        return Costs(
            {
                lane: {file: tests for file, tests in sorted(files.items()) if tests}
                for lane, files in sorted(lanes.items())
            }
        )

    def write(self):
        """Replace the file of this tree."""
        FILE.write_text(_text(self.listed) + "\n", encoding="utf-8")


def _text(tree, indent=""):
    """JSON with a line for each entry."""
    if not isinstance(tree, dict):
        return json.dumps(tree)
    lines = (f"{indent} {json.dumps(k)}: {_text(v, indent + ' ')}" for k, v in tree.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def function_of(name):
    """`test_a` of `test_a[8-True]`."""
    return name.partition("[")[0]


# ---- measuring -----------------------------------------------------------------------------------


def _cpu_s():
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


_STARTED = pytest.StashKey[float]()
_PACE = Pace()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Note when a test starts."""
    item.stash[_STARTED] = _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """The last report of a test tells its cost to the process that prints."""
    report = yield
    if call.when == "teardown":
        cost = lane_of(item), _cpu_s() - item.stash[_STARTED], _PACE.probes()
        report.user_properties.append((_PROPERTY, cost))
    return report


class Meter:
    """Costs of the tests of this run, in the process that prints."""

    def __init__(self):
        self.spent, self.probes = {}, []

    def pytest_runtest_logreport(self, report):
        """Keep what a last report tells."""
        for _, (lane, spent, probes) in (p for p in report.user_properties if p[0] == _PROPERTY):
            self.spent[lane, report.nodeid] = spent
            self.probes += probes

    @property
    def pace(self):
        """How many CPU-seconds of this run are one second of cost."""
        return pace_of(self.probes)

    @property
    def seconds(self):
        """Cost of each test, by lane and name."""
        pace = self.pace
        return {test: spent / pace for test, spent in self.spent.items()}

    def by_file(self):
        """Seconds by lane, file and test."""
        found = defaultdict(lambda: defaultdict(dict))
        for (lane, test), seconds in self.seconds.items():
            file, _, name = test.partition("::")
            found[lane][file][name] = seconds
        return found

    def by_folder(self):
        """Seconds by folder of `tests/`, one of which is a capability."""
        found = defaultdict(float)
        for (_, test), seconds in self.seconds.items():
            found[folder_of(test)] += seconds
        return found

    def dearest(self):
        """The most expensive tests, most expensive first."""
        return sorted(((s, test) for (_, test), s in self.seconds.items()), reverse=True)[:_SHOWN]


def folder_of(test):
    """`train` of `tests/step/test_step.py::test_a`, and of a file in `tests/` its own name."""
    return Path(test.partition("::")[0]).parts[1].removesuffix(".py")


def _listed(tests):
    """What the list holds of one file: `tests` are seconds by name."""
    dear = {name: round(seconds, 1) for name, seconds in tests.items() if seconds > DEAR_S}
    cheap = defaultdict(list)
    for name, seconds in tests.items():
        if name not in dear:
            cheap[function_of(name)].append(seconds)
    sums = {name: [len(cases), round(sum(cases), 1)] for name, cases in cheap.items()}
    return dear | {name: pair for name, pair in sums.items() if pair[1] >= SMALL_S}


# ---- telling -------------------------------------------------------------------------------------


class Budgets:
    """CPU-seconds that a folder of tests may cost in the core, and in all the other lanes."""

    def __init__(self, given):
        self.given = given

    @classmethod
    def read(cls):
        """Those of this tree."""
        return cls(tomllib.loads(BUDGETS.read_text(encoding="utf-8")))

    def over(self, spent, part):
        """Sentences on the folders that cost more than they may in `part`: `core` or `rest`."""
        return [
            f"tests/{folder} took {seconds:.0f} CPU-seconds of the {self.of(folder)[part]} it may"
            f" cost in the {part}; make it cheaper, or move cases behind the mark `sweep`"
            for folder, seconds in sorted(spent.items())
            if seconds > self.of(folder)[part]
        ]

    def of(self, folder):
        """Budgets of a folder; one that has none of its own is a new capability."""
        return {**self.given["capability"], **self.given.get(folder, {})}


def pytest_addoption(parser):
    """Options of this plugin."""
    group = parser.getgroup("costs")
    group.addoption("--renew-costs", action="store_true", help="write them to tests/costs.json")
    group.addoption("--hold-budgets", action="store_true", help="fail beyond tests/budgets.toml")


def pytest_configure(config):
    """Only the process that prints sums up."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Meter(), "meter")


def pytest_sessionfinish(session):
    """Write or hold what was asked for."""
    meter = session.config.pluginmanager.get_plugin("meter")
    if meter is None:
        return
    if session.config.getoption("--renew-costs"):
        Costs.read().renewed(meter.by_file()).write()
    if _over(session.config, meter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """What the run cost, and which tests cost most."""
    meter = config.pluginmanager.get_plugin("meter")
    spent = sum(meter.spent.values())
    if spent < 1:
        return
    told = f"{spent / meter.pace:.0f} CPU-seconds ({spent:.0f} at a pace of {meter.pace:.2f})"
    terminalreporter.section(told, "-")
    for seconds, test in meter.dearest():
        terminalreporter.line(f"{seconds:7.1f} {test}")
    for sentence in _over(config, meter):
        terminalreporter.line(f"OVER BUDGET: {sentence}", red=True)


def _over(config, meter):
    if not config.getoption("--hold-budgets"):
        return []
    part = "core" if config.getoption("--core") else "rest"
    return Budgets.read().over(meter.by_folder(), part)
