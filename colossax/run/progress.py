"""What a person sees while a run trains; all of it goes to standard error."""

import contextlib
import datetime
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO, cast, runtime_checkable

from colossax.documents import why

LINE_EVERY_S = 10.0


@runtime_checkable
class Stream(Protocol):
    """What is needed of a text stream."""

    def write(self, text: str, /) -> Any:
        """Write text."""

    def flush(self) -> None:
        """Let it be seen."""

    def isatty(self) -> bool:
        """Whether a person sees it at once."""


class Lasting:
    """A stream that may go away, as a pipe's reader or a terminal does; nothing is raised then."""

    def __init__(self, stream: Stream | None, gone: Callable[[str], None]):
        """Write to a stream; `gone` is called once, with the reason, when that fails."""
        self._stream, self._gone = stream, gone
        self._is_gone = False

    @property
    def encoding(self) -> str:
        """That of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> None:
        """Write text, as long as there is somebody to read it."""
        self._try(lambda stream: stream.write(text))

    def flush(self) -> None:
        """Let it be seen."""
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        """Whether a person sees it at once."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def _try(self, action: Callable[[Stream], object]) -> None:
        if self._is_gone:
            return
        try:
            if self._stream is None:
                raise OSError(0, "it is closed")
            action(self._stream)
        except (OSError, ValueError) as problem:  # ValueError: of a stream that was closed
            self._is_gone = True
            self._gone(why(problem))


@runtime_checkable
class Progress(Protocol):
    """Shows where a run is."""

    def step(self, step: int, loss: float, tokens_per_s: float, mfu: float | None) -> None:
        """A step is known to be done."""

    def note(self, text: str) -> None:
        """Something a person should read."""

    def close(self) -> None:
        """Nothing more comes."""


class Silent:
    """For all processes but the first."""

    def step(self, step: int, loss: float, tokens_per_s: float, mfu: float | None) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """One line now and then, for logs."""

    def __init__(self, steps: int, stream: Stream, counted: str = "tokens"):
        self._steps = steps
        self._counted = counted
        self._stream = stream
        self._next = 0.0

    def step(self, step: int, loss: float, tokens_per_s: float, mfu: float | None) -> None:
        """Write a line if the last one is a while ago."""
        now = time.monotonic()
        if now >= self._next or step == self._steps:
            self._next = now + LINE_EVERY_S
            facts = [f"loss {loss:.4f}", f"{tokens_per_s:,.0f} {self._counted}/s"]
            facts += [] if mfu is None else [f"MFU {mfu:.1%}"]
            self.note(f"step {step}/{self._steps}  {'  '.join(facts)}")

    def note(self, text: str) -> None:
        """Write a line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """A live bar with loss, speed, MFU and time left, for terminals."""

    def __init__(self, steps: int, done: int, stream: Stream, counted: str = "tokens"):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._rich = RichProgress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}"),
            TextColumn("{task.fields[speed]} " + f"{counted}/s"),
            TextColumn("{task.fields[mfu]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=Console(file=cast(TextIO, stream)),
            expand=True,
            refresh_per_second=4,
        )
        self._task = self._rich.add_task(
            "train", total=steps, completed=done, loss="-", speed="-", mfu=""
        )
        self._rich.start()

    def step(self, step: int, loss: float, tokens_per_s: float, mfu: float | None) -> None:
        """Move the bar; it is drawn by a thread of its own a few times a second."""
        fields: dict[str, Any] = {"loss": f"{loss:.3f}", "speed": f"{tokens_per_s:,.0f}"}
        fields["mfu"] = "" if mfu is None else f"MFU {mfu:.0%}"
        self._rich.update(self._task, completed=step, **fields)

    def note(self, text: str) -> None:
        """Print above the bar."""
        self._rich.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._rich.stop()


class Screen:
    """What a run shows: lines before it trains and after, a bar or lines while it does.

    When nobody reads them any more, training goes on, and notes go to the run's log.
    """

    def __init__(self, *, visible: bool, stream: Stream | None = None, log: Path | None = None):
        self._visible = visible
        self._stream = Lasting(sys.stderr if stream is None else stream, self._go_dark)
        self._log = log
        self._is_dark = False
        self._lines: Progress = Lines(0, self._stream) if visible else Silent()
        self._now: Any = self._lines

    def start(self, *, steps: int, done: int, counted: str = "tokens") -> None:
        """Training starts, `done` of `steps` are behind it; speed is of what is counted."""
        if self._visible and not self._is_dark:
            terminal = self._stream.isatty()
            self._now = (
                Bar(steps, done, self._stream, counted)
                if terminal
                else Lines(steps, self._stream, counted)
            )

    def step(self, step: int, loss: float, tokens_per_s: float, mfu: float | None) -> None:
        """A step is known to be done."""
        self._now.step(step, loss, tokens_per_s, mfu)

    def note(self, text: str) -> None:
        """Something a person should read."""
        if not self._is_dark:
            self._now.note(text)
        if self._is_dark:
            self._write_log(text)

    def close(self) -> None:
        """Training is over; a bar stays as it stands."""
        self._now.close()
        self._now = self._lines

    def _go_dark(self, reason: str) -> None:
        self._is_dark = True
        self._write_log(f"standard error can no longer be written ({reason}); training goes on")

    def _write_log(self, text: str) -> None:
        if self._log is None or not self._visible:
            return
        when = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as log:
            log.write(f"{when} {text}\n")
