"""What gives batches, made into what a run asks for: batches from any number on."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from colossax.errors import InputError
from colossax.tasks import Callback, Task
from colossax.tasks.task import Batches, ResumableBatches
from colossax.typing import Batch

BatchSource = ResumableBatches | Iterable[Batch] | Callable[[int], Batch]
"""What `fit` takes its batches from."""


class StatefulBatches(Callback):
    """Batches of an iterator that says where it stands, as Grain's do: `get_state`, `set_state`.

    Each checkpoint keeps the state, with which a resumed run goes on; it draws nothing twice.
    """

    def __init__(self, iterator: Any, draw: Iterator[Batch]):
        """Take the iterator, and what draws batches from it."""
        self.iterator, self.draw = iterator, draw
        self.resumed = False

    def start(self, step: Any, state: Any) -> None:
        """A run begins: the iterator as it stands."""
        self.resumed = False

    def __call__(self, now: Any) -> None:
        """Nothing: it is there for what checkpoints keep."""

    def saved(self) -> Any:
        """Where the iterator stands."""
        state = self.iterator.get_state()
        if isinstance(state, bytes):  # of Grain's DataLoader: text that is JSON
            return {"text": state.decode()}
        try:
            return {"json": json.loads(json.dumps(state))}
        except (TypeError, ValueError) as problem:
            raise InputError(
                f"fit: get_state() of the batches gives what is no JSON ({problem}); give an"
                " iterator whose state is JSON, or an object with batches(start_step)"
            ) from problem

    def resume(self, saved: Any) -> None:
        """Go on from there."""
        state = saved["text"].encode() if "text" in saved else saved["json"]
        self.iterator.set_state(state)
        self.resumed = True


class _Again:
    """Batches of an iterable, and once more from the beginning where it gives them repeatedly."""

    def __init__(self, batches: Iterable[Batch]):
        self._batches, self._once = batches, iter(batches)

    @property
    def says_where(self) -> bool:
        return all(callable(getattr(self._once, name, None)) for name in ("get_state", "set_state"))

    def get_state(self) -> Any:
        return self._once.get_state()  # type: ignore[attr-defined]

    def set_state(self, state: Any) -> None:
        self._once.set_state(state)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Batch]:
        gave = True  # the first may have been resumed at its end
        while True:
            for batch in self._once:
                gave = True
                yield batch
            again = iter(self._batches)
            if not gave or again is self._once:
                return
            self._once, gave = again, False


def with_source(task: Task, source: Any, *, begun: int = 0) -> Task:
    """The task with its batches from a source, whose state its checkpoints keep where it has one.

    Args:
        task: Whose batches are replaced.
        source: An object with `batches(start_step)`, a function of the number, or an iterable.
        begun: Steps that the run's first state had seen; an iterable's first batch follows them.
    """
    if isinstance(source, ResumableBatches):
        return _taking(task, lambda start: iter(source.batches(start)))
    if not isinstance(source, Iterable):
        return _taking(task, lambda start: map(source, itertools.count(start)))
    again = _Again(source)
    if not again.says_where:
        return _taking(task, lambda start: itertools.islice(iter(again), start - begun, None))
    stateful = StatefulBatches(again, iter(again))

    def drawn(start: int) -> Iterator[Batch]:
        return itertools.islice(stateful.draw, 0 if stateful.resumed else start - begun, None)

    # Last, so that no callback of the task goes by another name for it.
    return _taking(task, drawn, [*task.callbacks, stateful])


def _taking(task: Task, drawn: Callable[[int], Iterator[Batch]], callbacks: Any = None) -> Task:
    @contextlib.contextmanager
    def batches(_step: Any, start: int) -> Iterator[Iterator[Batch]]:
        yield drawn(start)

    taken: Batches = batches
    more = {} if callbacks is None else {"callbacks": callbacks}
    return dataclasses.replace(task, batches=taken, **more)


def settled_source(task: Task) -> Task:
    """The task; where its batches are a source and no function of step and number, made one."""
    return task if callable(task.batches) else with_source(task, task.batches)
