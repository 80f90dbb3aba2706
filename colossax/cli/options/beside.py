"""Options beside a checkpoint: its adapters, and what is kept of a sequence."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from colossax.config import user_path
from colossax.errors import InputError
from colossax.scheduling import Keep

_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
_NAMES = ("sinks", "heavy", "window")
_NUMBER = re.compile(r"[0-9]{1,9}")
_EXAMPLE = "window=1024 with sinks=4 or heavy=512"


def adapter_option(parser: Any, told: str) -> None:
    """Declare `--adapter`."""
    parser.add_argument(
        "--adapter",
        metavar="[NAME=]CHECKPOINT",
        action="append",
        help=f"an adapter of CHECKPOINT, which its base is then; several times: {told}",
    )


def adapters_of(
    args: argparse.Namespace,
    base: Any,
    name_of: Callable[[str, Any], str] = lambda word, _stored: word,
) -> dict[str, Any]:
    """Those that were asked for beside a checkpoint, by name.

    Args:
        args: With `checkpoint`, `adapter`, and the `adapter_steps` of an engine started again.
        base: The checkpoint.
        name_of: What one is called that was given no name, of the words that say where it is.

    Raises:
        InputError: The checkpoint is no base, one of them is no adapter of it, or two have a name.
    """
    from colossax.inference import open_checkpoint

    if not args.adapter:
        return {}
    if base.base is not None:
        raise InputError(
            f"--adapter: '{args.checkpoint}' is an adapter itself; give its base as CHECKPOINT and"
            " it with --adapter too"
        )
    steps = getattr(args, "adapter_steps", None)
    found: dict[str, Any] = {}
    for at, word in enumerate(args.adapter):
        named = _NAMED.fullmatch(word)
        given, path = (None, word) if named is None else named.groups()
        step = None if steps is None else int(steps.split(",")[at])
        place = str(base.directory / str(base.step))
        one = open_checkpoint(user_path(path, "--adapter"), base=place, step=step)
        if one.base is None:
            raise InputError(
                f"--adapter: '{path}' holds a whole model; give it as CHECKPOINT, alone"
            )
        name = given or name_of(path, one)
        if name in found:
            raise InputError(
                f"--adapter: two are called '{name}'; give one another name, as in"
                f" --adapter another={path}"
            )
        found[name] = one
        one.check_beside(next(iter(found.values())))
    return found


def keep_option(parser: Any) -> None:
    """Declare it; `keep_of` reads it."""
    parser.add_argument(
        "--keep",
        metavar="WHAT",
        help="keep some tokens of each sequence alone, and say what follows from those: sinks=4,"
        "window=1024 the first ones and the last; heavy=512,window=512 those that were looked at"
        " most and the last; default all",
    )


def keep_of(args: argparse.Namespace) -> Keep | None:
    """What was asked for; None: all is kept.

    Raises:
        InputError: It is not read, or out of bounds.
    """
    if args.keep is None:
        return None
    given: dict[str, int] = {}
    for word in args.keep.split(","):
        name, _, value = word.partition("=")
        if name not in _NAMES or name in given or not _NUMBER.fullmatch(value):
            raise InputError(f"--keep: found '{args.keep}'; give {_EXAMPLE}, each number once")
        given[name] = int(value)
    if given.get("heavy") == 0:
        raise InputError(f"--keep: found '{args.keep}'; give heavy 1 or more, or leave it out")
    if "window" not in given:
        raise InputError(f"--keep: found '{args.keep}' without a window; give {_EXAMPLE}")
    keep = Keep(**given)
    keep.check()
    return keep
