"""Options of a verb apart from dotted overrides, with refusals of one sentence."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from colossax.cli.options.overrides import Override
from colossax.config import Bound, nearest
from colossax.errors import InputError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `InputError` and names the nearest option."""

    def __init__(self, *, prog: str, description: str):
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.prepare: Callable[[Sequence[str]], None] = lambda words: None
        """Called with the words before the help is made, to say in it what depends on them."""

        self.alone: dict[str, str] = {}
        """What an option stands for where it has no `=`: the next word is none of its own."""

    def error(self, message: str) -> NoReturn:
        """Refuse in place of printing the usage and exiting."""
        _, surplus, words = message.partition("unrecognized arguments: ")
        if surplus:
            self._refuse_surplus(words.split()[0])
        raise InputError(f"{message}; see {self.prog} --help")

    def _refuse_surplus(self, word: str) -> NoReturn:
        """Say of a word that belongs to no option what it may have been."""
        name, equals, value = word.lstrip("-").partition("=")
        if f"--{name}" in self._option_string_actions:
            meant = f"--{name}{f' {value}' if equals else ''}"
            raise InputError(f"'{word}' is no option; did you mean '{meant}'?")
        alone = [option for option in self.alone if f"{option}={word}" in self.format_help()]
        if alone:
            raise InputError(f"'{word}' stands alone; did you mean '{alone[0]}={word}'?")
        raise InputError(f"'{word}' is one word too many; see {self.prog} --help")

    def option(self, name: str) -> argparse.Action:
        """The option of this name."""
        return next(action for action in self._actions if name in action.option_strings)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The options in `words`.

        Raises:
            InputError: An unknown option, or a value that does not fit.
        """
        options = [word.split("=")[0] for word in words if word[:2] == "--" != word]
        strange = [name for name in options if name not in self._option_string_actions]
        if strange or "-h" in words or "--help" in words:  # the help is most of the work
            self.prepare(words)
        if strange:
            known = set(re.findall(r"--[a-z][a-z0-9_.-]*[a-z0-9]", self.format_help()))
            unknown = [name for name in strange if name not in known]
            if unknown:
                near = nearest(unknown[0], known, dotted=False)
                raise InputError(f"unknown option {unknown[0]}{near}")
        return self.parse_args([self.alone.get(word, word) for word in words])


BASE_HELP = "of an adapter: where the checkpoint that it was trained beside is now"


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Words without dotted options, and those as (name, value) in their order.

    Raises:
        InputError: A dotted option without a value.
    """
    plain: list[str] = []
    overrides: list[Override] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or "." not in name:
            plain.append(word)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"{name}: needs a value, as in {name} VALUE")
            value = rest.pop(0)
        overrides.append((name[2:], value))
    return plain, overrides


def number(low: int, high: int | None = None):
    """An argparse type: a whole number of at least `low` and at most `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, found '{text}'") from None
        return _held(value, Bound(low=low, high=high))

    return parse


def real(bound: Bound, what: str = "a number"):
    """An argparse type: a number within a bound."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, found '{text}'") from None
        return _held(value, bound)

    return parse


seconds = real(Bound(low=0, above=True, told="more than 0 seconds"), "seconds")
"""An argparse type: seconds above 0."""


def _held(value: Any, bound: Bound) -> Any:
    if (refusal := bound.refusal(value)) is not None:
        raise argparse.ArgumentTypeError(refusal)
    return value


def recipe_of_a_file(parser: argparse.ArgumentParser) -> None:
    """Declare where else a recipe comes from than the library."""
    parser.add_argument(
        "--config", metavar="FILE", help="a recipe as JSON or TOML, such as a run's run.json"
    )
    parser.add_argument(
        "--list", action="store_true", help="tell the recipes of the library, a line each, and end"
    )


def plan_of_a_file(parser: argparse.ArgumentParser) -> None:
    """Declare where else a plan comes from than a recipe."""
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="a plan as JSON, such as `colossax plan --out` writes, in place of the recipe's, or"
        " auto: the fastest that fits is found, as `colossax plan` does; --plan.* are put over it",
    )


def keeping(parser: argparse.ArgumentParser) -> None:
    """Declare what keeps no programs."""
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="compile anew, and keep nothing of compiled programs in the user's cache folder",
    )


def several_processes(parser: argparse.ArgumentParser) -> None:
    """Declare how a process finds the others it works with."""
    many = parser.add_argument_group(
        "several processes", "found out under Slurm, Open MPI, Kubernetes"
    )
    many.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 can be reached")
    many.add_argument("--processes", metavar="N", type=number(1), help="how many there are")
    many.add_argument("--process-id", metavar="I", type=number(0), help="which one this is, from 0")
    many.add_argument(
        "--timeout-s",
        metavar="T",
        type=seconds,
        default=300.0,
        help="how long to wait for the others; default %(default)g",
    )
