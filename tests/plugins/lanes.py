"""Which of the selected tests run: the core, the rest, a part of them.

The core is what people run without thinking: every test that costs no more than `costs.DEAR_S`,
and of each file that has none of those its cheapest test, so that all files are represented, but
for slow ones; and tests marked `sentinel`, which alone catch something that matters.
"""

import itertools

import pytest

from tests.plugins.costs import SLOW_S, Costs, function_of


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
    if "gpu" not in config.getoption("markexpr"):  # cases of lists that a quick run leaves out, too
        kept = [item for item in kept if item.get_closest_marker("gpu") is None]
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
    chosen = {item for item in items if not costs.is_dear(item) or is_sentinel(item)}
    for _, of_file in itertools.groupby(items, _file):
        tests = list(of_file)
        cheapest = min(tests, key=costs.of)
        if chosen.isdisjoint(tests) and costs.of(cheapest) < SLOW_S:
            chosen.add(cheapest)
    return [item for item in items if item in chosen]


def is_sentinel(item):
    """Whether a test is marked so, as a whole or by the case of its parameters."""
    mark = item.get_closest_marker("sentinel")
    case = item.name.partition("[")[2].removesuffix("]")
    return mark is not None and (not mark.args or case in mark.args)


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
