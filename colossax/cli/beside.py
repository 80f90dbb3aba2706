"""Adapters that `--adapter` names, beside the checkpoint of their base."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from colossax.config import user_path
from colossax.errors import InputError

_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


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
