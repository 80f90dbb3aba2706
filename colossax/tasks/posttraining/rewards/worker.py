"""A process that gives rewards: a line of JSON in, a line out; without JAX.

python -m colossax.tasks.posttraining.rewards.worker MODULE:FUNCTION BYTES
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colossax.tasks.posttraining.rewards.answer import Answer

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Answer until nothing more is asked, and return the exit code."""
    name, memory_bytes = sys.argv[1], int(sys.argv[2])
    _end_with_parent()
    heard = os.fdopen(os.dup(0), encoding="utf-8")
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the function prints is no answer of ours
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # and what is asked of us is no input of its own

    def tell(**what: Any) -> None:
        told.write(json.dumps(what) + "\n")
        told.flush()

    try:
        function = _named(name)
    except Exception as problem:  # noqa: BLE001 (any that the user's module raises)
        tell(problem=f"{type(problem).__name__}: {' '.join(str(problem).split())}")
        return 1
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    tell(ready=True)
    for line in heard:
        tell(**_rewarded(function, json.loads(line)))
    return 0


def _rewarded(function: Callable[[list[Answer]], Any], asked: list[dict[str, Any]]) -> Any:
    """Rewards of all answers, or why there are none."""
    try:
        found = function([_answer(**one) for one in asked])
    except MemoryError:
        return {"failed": "memory", "said": "it needs more memory than it may have"}
    except Exception as problem:  # noqa: BLE001 (any that the user's function raises)
        return {"failed": "error", "said": f"{type(problem).__name__}: {problem}"[:300]}
    try:
        return {"rewards": [float(one) for one in found]}
    except (TypeError, ValueError):
        return {"wrong": f"a {type(found).__name__}"}


def _end_with_parent() -> None:
    """Have the kernel kill this process when the one that began it ends, where it can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(prompt: list[dict[str, Any]], **rest: Any) -> Answer:
    return Answer(prompt=tuple(prompt), **rest)


def _named(name: str) -> Callable[[list[Answer]], Any]:
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    return getattr(importlib.import_module(module), attribute)


if __name__ == "__main__":
    sys.exit(main())
