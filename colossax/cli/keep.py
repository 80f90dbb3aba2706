"""Options of what is kept of a sequence, for the verb that continues prompts."""

import argparse
import re
from typing import Any

from colossax.errors import InputError
from colossax.scheduling import Keep

_NAMES = ("sinks", "heavy", "window")
_NUMBER = re.compile(r"[0-9]{1,9}")
_EXAMPLE = "window=1024 with sinks=4 or heavy=512"


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
