"""Which of the selected tests run: the core, the rest, a part of them.

The core is what people run without thinking: every test that costs no more than `costs.DEAR_S`,
and of each file that has none of those its cheapest test, so that all files are represented; and
tests marked `sentinel`, which alone catch something that matters.
"""

import itertools

import pytest

from tests.plugins.costs import Costs, function_of


def pytest_addoption(parser):
    """Options of this plugin."""
    group = parser.getgroup("lanes")
    group.addoption("--core", action="store_true", help="run what is cheap, and sentinels")
    group.addoption("--rest", action="store_true", help="run what --core leaves out")
    group.addoption(
        "--part", type=_part, metavar="I/N", help="run one of N parts of like cost; I from 1"
    )
    group.addoption(
        "--every", type=int, default=1, metavar="N", help="run the first test and every Nth after"
    )


def _part(text):
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ValueError(text)
    return int(index), int(count)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave out tests as the options say, after marks and names have chosen."""
    kept, costs = items[:], Costs.read()
    if config.getoption("--core"):
        kept = core(kept, costs)
    if config.getoption("--rest"):
        chosen = set(core(kept, costs))
        kept = [item for item in kept if item not in chosen]
    if config.getoption("--part"):
        kept = part(kept, costs, *config.getoption("--part"))
    kept = kept[:: config.getoption("--every")]
    if len(kept) < len(items):
        left = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = kept


def core(items, costs):
    """The items of the core, in their order."""
    chosen = {i for i in items if not costs.is_dear(i) or i.get_closest_marker("sentinel")}
    for _, of_file in itertools.groupby(items, _file):
        tests = list(of_file)
        if chosen.isdisjoint(tests):
            chosen.add(min(tests, key=costs.of))
    return [item for item in items if item in chosen]


def part(items, costs, index, count):
    """The items of one of `count` parts: functions whole, dearest first to the cheapest part."""
    sums, functions = [0.0] * count, {}
    for item in items:
        functions.setdefault((_file(item), function_of(item.name)), []).append(item)
    chosen = set()
    for tests in sorted(functions.values(), key=lambda ts: -sum(map(costs.of, ts))):
        cheapest = sums.index(min(sums))
        sums[cheapest] += sum(map(costs.of, tests))
        if cheapest == index - 1:
            chosen.update(tests)
    return [item for item in items if item in chosen]


def _file(item):
    return item.nodeid.partition("::")[0]
