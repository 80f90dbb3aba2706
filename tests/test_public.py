"""The list of public names: what is exported is a promise, and this is where it is read."""

import importlib

import pytest

NAMES = {
    "colossax": "Plan attention boost constrain linear preset use",
}


def exported(module):
    """Names an `__init__` re-exports or defines, rooms and private names aside."""
    room = importlib.import_module(module)
    return sorted(
        name
        for name, value in vars(room).items()
        if not name.startswith("_") and not _is_module(value) and _is_ours(value)
    )


def _is_module(value):
    return type(value).__name__ == "module"


def _is_ours(value):
    return getattr(value, "__module__", "colossax").startswith("colossax")


@pytest.mark.parametrize("module", NAMES)
def test_public_names(module):
    assert exported(module) == sorted(NAMES[module].split())
