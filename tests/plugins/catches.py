"""`--catches NAME[,NAME]` runs the tests that catch breaks of these names; see `ci/breaks.py`.

With `--hypothesis-profile first` the first example that fails is reported, however large.
"""

import hypothesis

hypothesis.settings.register_profile(
    "first",
    deadline=None,
    derandomize=True,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)


def pytest_addoption(parser):
    """The option; it also picks tests that are left out by default, such as `aot`."""
    parser.addoption("--catches", metavar="NAME[,NAME]", help="run the tests marked to catch these")


def pytest_configure(config):
    """The names say enough: no other mark leaves a test out."""
    if config.getoption("--catches"):
        config.option.markexpr = ""


def pytest_collection_modifyitems(config, items):
    """Leave out what catches none of them."""
    names = config.getoption("--catches")
    if not names:
        return
    wanted = set(names.split(","))
    caught = [
        {name for mark in item.iter_markers("catches") for name in mark.args} for item in items
    ]
    left_out = [item for item, found in zip(items, caught, strict=True) if not found & wanted]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, found in zip(items, caught, strict=True) if found & wanted]
