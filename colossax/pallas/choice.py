"""Which of several implementations of an operation runs."""

import functools
import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from .target import Target

_LOG = logging.getLogger(__name__)


def choose(
    operation: str,
    implementations: Mapping[str, ModuleType],
    spec: Any,
    target: Target,
    implementation: str = "auto",
) -> str:
    """Name of the implementation that will run.

    Args:
        operation: What it is called in messages.
        implementations: By name, fastest first; each has `why_not(spec, target)`, None or the
            reason why it declines. One called `interpret` runs only if named, and so does one with
            a reason from `why_slow(target)`, where it has that function.
        spec: Static facts of the call; its text is what the log calls it.
        target: The hardware.
        implementation: `auto` for the first that accepts, or a name.

    Raises:
        ValueError: No such name.
        NotImplementedError: The one named declines.
        ExceptionGroup: All decline.
    """
    names = ("auto", *implementations)
    if implementation not in names:
        raise ValueError(f"{operation}: no implementation '{implementation}'; use one of {names}")
    reasons = {}
    automatic = [name for name in implementations if name != "interpret"]
    for name in automatic if implementation == "auto" else (implementation,):
        named = implementation != "auto"
        reason = _why_not(implementations[name], spec, target, named=named)
        if reason is None:
            declined = "; ".join(f"not {n}: {r}" for n, r in reasons.items())
            _log_once(operation, str(spec), name, declined)
            return name
        reasons[name] = reason
    declines = [
        NotImplementedError(f"{operation} '{name}': {why}") for name, why in reasons.items()
    ]
    if implementation != "auto":
        raise declines[0]
    raise ExceptionGroup(f"{operation}: no implementation takes this call", declines)


def reasons(
    implementations: Mapping[str, ModuleType], spec: Any, target: Target
) -> dict[str, str | None]:
    """Why `auto` leaves each implementation, None where it accepts; fastest first."""
    return {name: _why_not(one, spec, target) for name, one in implementations.items()}


def _why_not(one: Any, spec: Any, target: Target, *, named: bool = False) -> str | None:
    slow = None if named else getattr(one, "why_slow", None)
    return one.why_not(spec, target) or (slow and slow(target))


@functools.lru_cache(maxsize=1024)
def _log_once(operation: str, call: str, name: str, declined: str) -> None:
    _LOG.info("%s of %s: %s%s", operation, call, name, f" ({declined})" if declined else "")
