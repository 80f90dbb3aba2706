"""Packages whose names are imported when they are first asked for.

A command that only refuses a typo need not load JAX, which takes longer than all else it does.
"""

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` (PEP 562) of a package.

    What it exports is read from its own `if TYPE_CHECKING:` block, `from .part import X as X`, so
    that type checkers and the running program read the same lines; it is the package's `__all__`.
    Its modules are found too.

    Args:
        package: Its `__name__`.
    """
    names = functools.cache(lambda: _declared(package))

    def get(name: str) -> Any:
        own = f"{package}.{name}"
        if name == "__all__":
            value = sorted(names())
        elif name in names():
            value = getattr(importlib.import_module(names()[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(own) is not None:
            value = importlib.import_module(own)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *names()})


def _declared(package: str) -> dict[str, str]:
    """The module of each name."""
    file = sys.modules[package].__file__
    assert file is not None
    found = {}
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                module = "." * line.level + (line.module or "")
                home = importlib.util.resolve_name(module, package)
                found |= {alias.name: home for alias in line.names}
    return found
