"""What `--help` says of a recipe's values: meaning, choices and default, from the dataclasses."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from colossax.cli.options.overrides import override_names
from colossax.config import PRESETS, bound_of

_WIDTH = 96
_NOT_LISTED = ("plan.version", "plan.rules.")
_OF_THE_PLAN = (
    "  --plan.preset VALUE  mesh and rules by name, joined by +\n      {presets}\n"
    "  --plan.remat VALUE  of all segments\n      none, full, dots, or names to keep, joined by +\n"
    "  --plan.offload VALUE  what lies in host memory\n"
    "      auto, none, or shares: parameters=1,optimizer=1,disk=0.5\n"
    "  --plan.rules.ROLE.DIM VALUE  mesh axes of a dim; choices split by `,`, axes joined by +\n"
)


def described_values(config: Any) -> str:
    """Every dotted option that a recipe's configuration has, with its value there as default."""
    listed = (
        _described(config, name, value)
        for name, value in override_names(config)
        if "." in name and not name.startswith(_NOT_LISTED)
    )
    presets = textwrap.fill(", ".join(PRESETS), _WIDTH, subsequent_indent="      ")
    return (
        f"values of {config.recipe} by their dotted names:\n"
        f"{_OF_THE_PLAN.format(presets=presets)}{''.join(listed)}"
    )


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items()) or "empty"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and value.split() != [value] else str(value)


def _described(config: Any, name: str, value: Any) -> str:
    owner, field = _owner(config, name)
    choices = field.metadata.get("choices", ("true", "false") if field.type is bool else ())
    meaning = next((m for m in _meanings(owner) if m[0] == field.name), ("", ""))[1]
    bound = bound_of(type(owner), field.name)
    range_told = ", ".join(choices) or (str(bound) if bound else "")
    told = " ".join(filter(None, (meaning, f"({range_told})" if range_told else "")))
    head = f"  --{name} VALUE  default {shown(value)}\n"
    indent = " " * 6
    return head + textwrap.indent(textwrap.fill(told, _WIDTH - 6), indent) + "\n" * bool(told)


def _owner(config: Any, name: str) -> tuple[Any, dataclasses.Field]:
    *path, last = name.split(".")
    for step in path:
        config = config[int(step)] if step.isdigit() else getattr(config, step)
    return config, next(f for f in dataclasses.fields(config) if f.name == last)


def _meanings(owner: Any) -> Iterator[tuple[str, str]]:
    """(Field, first sentence) of each attribute that a docstring names, then those of its bases.

    A model's decoder's too.
    """
    for kind in type(owner).__mro__:
        _, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \w)", attributes.split("\n\n")[0]):
            names, _, text = entry.strip().partition(":")
            sentence = re.split(r"(?<=[.])\s", " ".join(text.split()), maxsplit=1)[0]
            yield from ((name, sentence) for name in names.split(", "))
    if hasattr(owner, "decoder"):
        yield from _meanings(owner.decoder())
