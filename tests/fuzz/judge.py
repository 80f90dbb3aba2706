"""What came of a call: its code, its words, its traceback; and the verdict on it."""

import contextlib
import dataclasses
import io
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from colossax.cli import main
from colossax.errors import InputError

VERDICTS = ("refused", "unharmed", "rebuilt", "accepted", "wrong")
"""`accepted` is an input that is valid though damage made it, such as another learning rate."""

LIMIT_S = 30.0
_LONGEST = 3000
_ENDLESS = re.compile(r"\S{400,}")
"""What the command line shortens where it tells a refusal."""


class Hung(BaseException):
    """A call took longer than `LIMIT_S`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """One of `VERDICTS`, and why."""

    name: str
    why: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call gave back.

    Attributes:
        value: The exit code, or what a function of the library returned; None where it refused.
        out: Standard output.
        said: Standard error, and warnings.
        refusal: The sentence of a refusal.
        fault: The traceback of anything else, or that it hung.
    """

    value: Any = None
    out: str = ""
    said: str = ""
    refusal: str | None = None
    fault: str | None = None


def wrong(why: str) -> Verdict:
    """A verdict against us."""
    return Verdict(name="wrong", why=why)


@contextlib.contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    def hung(_number: int, _frame: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def called(function: Callable[[], Any], *, limit_s: float = LIMIT_S) -> Outcome:
    """Call something; whatever it raises is part of the outcome."""
    out, said = io.StringIO(), io.StringIO()
    value, refusal, fault = None, None, None
    started = time.monotonic()
    with (
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(said),
    ):
        warnings.simplefilter("always")
        try:
            with _limited(limit_s):
                value = function()
        except InputError as problem:
            refusal = str(problem)
        except Hung:
            fault = f"hung: {time.monotonic() - started:.0f} s"
        except BaseException:  # noqa: BLE001 (a traceback of any kind is what is looked for)
            fault = traceback.format_exc()
    told = said.getvalue() + "".join(f"{one.message}\n" for one in warned)
    return Outcome(value=value, out=out.getvalue(), said=told, refusal=refusal, fault=fault)


def commanded(*words: str) -> Outcome:
    """`colossax WORDS` in this process; exit code 2 is a refusal, and its line the sentence."""
    done = called(lambda: main(list(words)))
    if done.fault is None and done.value == 2:
        lines = [line for line in done.said.splitlines() if line.startswith("colossax: ")]
        sentence = lines[-1].removeprefix("colossax: ") if lines else ""
        last = done.said.rstrip("\n").rpartition("colossax: ")[2]
        return dataclasses.replace(done, value=None, refusal=last if "\n" in last else sentence)
    return done


def judged(
    done: Outcome, *, names: tuple[str, ...] = (), good: Callable[[Outcome], Verdict]
) -> Verdict:
    """The verdict on an outcome: faults and bad sentences here, results by `good`.

    Args:
        done: The outcome.
        names: A refusal has to hold one of these; none: any sentence will do.
        good: Judges what came back where nothing was refused.
    """
    if done.fault is not None:
        return wrong(done.fault[-1500:])
    if done.refusal is None:
        return good(done)
    sentence = _ENDLESS.sub("...", done.refusal)
    if not sentence or "\n" in sentence or len(sentence) > _LONGEST:
        return wrong(f"refused, not in one short sentence: {sentence[:500]!r}")
    if names and not any(name in sentence for name in names):
        return wrong(f"refused without naming any of {names}: {sentence[:500]}")
    return Verdict(name="refused", why=sentence[:300])


Held = dict[int, tuple[int, int]]
"""Size and time of change by inode: a file that was moved aside is still held."""


def held(folder: Path) -> Held:
    """The files of a folder, whatever they are called."""
    stats = (path.lstat() for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {stat.st_ino: (stat.st_size, stat.st_mtime_ns) for stat in stats}


def lost(before: Held, folder: Path) -> int:
    """How many of these files are gone or changed."""
    after = held(folder)
    return sum(after.get(inode) != traits for inode, traits in before.items())
