"""What the pages of an engine are kept in: floats as the plan has them, or codes of eight bits."""

import dataclasses

from colossax.errors import InputError
from colossax.nn import CacheArray, CacheSpec
from colossax.pallas.attention.codes import SCALE

DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""Of codes, by format."""

FORMATS = ("own", *DTYPES)
"""Those that there are; `own` is the plan's `precision.cache`."""

SCALE_DTYPE = "bfloat16"


def check_format(form: str, name: str = "cache_format") -> None:
    """Refuse a format that there is none of.

    Args:
        form: What was asked for.
        name: By what.

    Raises:
        InputError: It is not one of `FORMATS`.
    """
    if form not in FORMATS:
        raise InputError(f"{name}: found '{form}'; give {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")


def in_codes(arrays: dict[str, CacheArray], form: str) -> dict[str, CacheArray]:
    """Arrays of pages in a format: codes, and beside each array the scales of its vectors.

    Args:
        arrays: By name.
        form: One of `FORMATS`.

    Raises:
        InputError: One of them is read otherwise than by `attend_cache`.

    Cost: a byte for each number and two for each vector, as a key of one head of one token.
    """
    if form == "own":
        return arrays
    found = {}
    for name, one in arrays.items():
        if not one.coded:
            raise InputError(
                f"cache_format: found '{form}', and the model reads what it keeps as '{name}' by"
                " itself, which knows no codes; give own"
            )
        found[name] = dataclasses.replace(one, dtype=DTYPES[form], coded=False)
        found[name + SCALE] = CacheArray(
            shape=one.shape[:-1], dims=one.dims[:-1], role=one.role, dtype=SCALE_DTYPE
        )
    return found


def check_any(specs: dict[str, CacheSpec], form: str) -> None:
    """Refuse a format where there is nothing to be kept in it.

    Raises:
        InputError: Nothing of the cache lies in pages.
    """
    if form != "own" and not any(n.endswith(SCALE) for one in specs.values() for n in one.arrays):
        raise InputError(
            f"cache_format: found '{form}', and nothing that the model keeps of tokens lies in"
            " pages; give own"
        )
