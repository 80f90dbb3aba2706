"""What goes wrong within a loss of one's own, where the cause is known, in one sentence."""

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from colossax.errors import InputError

_LIBRARY = Path(__file__).parents[1]
_ASKS_FOR_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@contextlib.contextmanager
def explained(batch: Mapping[str, Any]) -> Iterator[None]:
    """Say of what a loss raises what was meant, where it is one of two slips.

    It looks for an array that the batch has not; or asks for the value of an array of which only
    the shape is known, in code that is not the library's. All else is raised as it is.

    Args:
        batch: As the loss gets it.

    Raises:
        InputError: One of the two, with the line.
    """
    try:
        yield
    except KeyError as problem:
        if not _looked_up(problem, batch):
            raise
        line = _line(problem)
        raise InputError(
            f"batch: the loss{f' ({line})' if line else ''} asks for '{problem.args[0]}', and there"
            f" are {', '.join(map(repr, batch))}; add it to the batch, or ask for one of these"
        ) from problem
    except _ASKS_FOR_VALUES as problem:
        line = _line(problem)
        if line is None:
            raise
        raise InputError(
            f"loss: {line} asks for the value of an array, which is not known while the step is"
            " traced; compute with jax.numpy in place of if, float or numpy, as in"
            " jnp.where(x > 0, a, b)"
        ) from problem


def _looked_up(problem: KeyError, batch: Mapping[str, Any]) -> bool:
    """Whether it was the batch that lacked the key, as `batch["name"]` in some line."""
    frame = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)][-1]
    place = traceback.extract_tb(problem.__traceback__)[-1]
    if place.lineno is None or place.lineno != place.end_lineno or place.colno is None:
        return False
    line = linecache.getline(place.filename, place.lineno).encode()
    subscript = re.match(r"(\w+)\s*\[", line[place.colno : place.end_colno].decode())
    return subscript is not None and frame.f_locals.get(subscript[1]) is batch


def _line(problem: Exception) -> str | None:
    """`file.py:12`, the innermost line that is neither a package's nor the library's."""
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        path = Path(frame.filename)
        if _LIBRARY in path.parents:
            return None
        if "site-packages" not in path.parts:
            return f"{path.name}:{frame.lineno}"
    return None
