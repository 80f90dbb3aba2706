"""What a person sees while a run trains; all of it goes to standard error."""

import sys
import time
from typing import Any, Protocol, TextIO, cast, runtime_checkable

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

    def __init__(self, steps: int, stream: Stream):
        self._steps = steps
        self._stream = stream
        self._next = 0.0

    def step(self, step: int, loss: float, tokens_per_s: float, mfu: float | None) -> None:
        """Write a line if the last one is a while ago."""
        now = time.monotonic()
        if now >= self._next or step == self._steps:
            self._next = now + LINE_EVERY_S
            facts = [f"loss {loss:.4f}", f"{tokens_per_s:,.0f} tokens/s"]
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

    def __init__(self, steps: int, done: int, stream: Stream):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._rich = RichProgress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
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
    """What a run shows: lines before it trains and after, a bar or lines while it does."""

    def __init__(self, *, visible: bool, stream: Stream | None = None):
        self._visible = visible
        self._stream = sys.stderr if stream is None else stream
        self._lines: Progress = Lines(0, self._stream) if visible else Silent()
        self._now: Any = self._lines

    def start(self, *, steps: int, done: int) -> None:
        """Training starts, `done` of `steps` are behind it."""
        if self._visible:
            terminal = self._stream.isatty()
            self._now = Bar(steps, done, self._stream) if terminal else Lines(steps, self._stream)

    def step(self, step: int, loss: float, tokens_per_s: float, mfu: float | None) -> None:
        """A step is known to be done."""
        self._now.step(step, loss, tokens_per_s, mfu)

    def note(self, text: str) -> None:
        """Something a person should read."""
        self._now.note(text)

    def close(self) -> None:
        """Training is over; a bar stays as it stands."""
        self._now.close()
        self._now = self._lines
