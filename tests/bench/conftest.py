"""The scripts of `bench/`, which are in no package."""

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of `bench/` by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in [name for name, module in sys.modules.items() if _is_script(module)]:
        del sys.modules[name]


def _is_script(module):
    return str(getattr(module, "__file__", None) or "").startswith(str(BENCH))
