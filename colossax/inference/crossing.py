"""Calls of a scheduler sent through stages: who enters at which tick, and what comes of it."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from colossax.errors import InputError
from colossax.inference.decode import Sampling
from colossax.inference.scheduler import Call, Scheduler
from colossax.inference.stages import StagedProgram, Tick
from colossax.typing import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """Calls that enter at one tick, at most one of a sequence.

    Attributes:
        group: Of all their sequences.
        calls: Each with its sequence's row in the group.
    """

    group: int = 0
    calls: tuple[tuple[int, Call], ...] = ()


class Seats:
    """Which sequence has which row of which group, and the calls that wait to enter."""

    def __init__(self, groups: int, rows: int, width: int):
        """All are free; those who come first are in different groups.

        Args:
            groups: How many.
            rows: Of each.
            width: Most tokens that enter at a tick.
        """
        self._width = width
        self._free = deque((group, row) for row in range(rows) for group in range(groups))
        self._taken: dict[int, tuple[int, int]] = {}
        self._waiting: tuple[deque[Call], ...] = tuple(deque() for _ in range(groups))
        self._turn = 0

    def add(self, call: Call) -> None:
        """Let a call wait.

        Raises:
            InputError: It begins one sequence too many, or fits into no tick.
        """
        if len(call.tokens) > self._width:
            raise InputError(
                f"scheduler: a call has {len(call.tokens)} tokens, and {self._width} enter at a"
                f" tick; give the scheduler that width, or Generator(tokens_per_step="
                f"{len(call.tokens)})"
            )
        if call.sequence not in self._taken:
            if not self._free:
                raise InputError(
                    f"sequences: {len(self._taken) + 1} have begun, and there are caches for"
                    f" {len(self._taken)}; give Generator(sequences={len(self._taken) + 1}), or"
                    " begin fewer at once"
                )
            self._taken[call.sequence] = self._free.popleft()
        self._waiting[self._taken[call.sequence][0]].append(call)

    def leave(self, sequence: int) -> None:
        """Its row is free."""
        self._free.append(self._taken.pop(sequence))

    def next(self) -> Entry:
        """What enters now: calls of the next group that waits, as many as fit."""
        groups = len(self._waiting)
        turns = ((self._turn + i) % groups for i in range(groups))
        group = next((one for one in turns if self._waiting[one]), None)
        if group is None:
            return Entry()
        self._turn = group + 1
        waiting, calls = self._waiting[group], {}
        while waiting and self._fits(waiting[0], calls):
            call = waiting.popleft()
            calls[self._taken[call.sequence][1]] = call
        return Entry(group=group, calls=tuple(calls.items()))

    def _fits(self, call: Call, calls: dict[int, Call]) -> bool:
        tokens = sum(len(one.tokens) for one in calls.values()) + len(call.tokens)
        return self._taken[call.sequence][1] not in calls and tokens <= self._width


def cross(
    program: StagedProgram, params: Params, scheduler: Scheduler
) -> Iterator[tuple[int, int]]:
    """What a scheduler's calls give, as `(sequence, token)`.

    Args:
        program: For several stages.
        params: Laid out for it.
        scheduler: Its requests are checked by whoever made them.

    Cost: a tick for each call, or several calls of a group; the caches of all groups. A token is
    known as many ticks after its call entered as there are stages.
    """
    seats = Seats(program.groups, program.rows, program.width)
    entries = deque([Entry()] * program.stages, maxlen=program.stages)
    flight = program.start(params)
    while True:
        while (call := scheduler.next()) is not None:
            seats.add(call)
        entries.appendleft(seats.next())
        if not any(entry.calls for entry in entries):
            return
        tokens, flight = program(params, flight, tick_of(program, entries))
        leaving = [(n, call) for n, (_, call) in enumerate(entries[-1].calls) if call.emits]
        if leaving:
            chosen = np.asarray(tokens)  # parts of prompts wait for nothing
            for number, call in leaving:
                token = int(chosen[number])
                if scheduler.took(call.sequence, token):
                    seats.leave(call.sequence)
                yield call.sequence, token


def tick_of(program: StagedProgram, entries: Sequence[Entry]) -> Tick:
    """What a tick is told.

    Args:
        program: Whose.
        entries: Of each stage, what it works on.
    """
    now = Tick.empty(width=program.width, stages=program.stages, rows=program.rows)
    now.group[:] = [entry.group for entry in entries]
    at = 0
    for row, call in entries[0].calls:
        here = slice(at, at + len(call.tokens))
        now.ids[here], now.seat[here] = call.tokens, row
        now.position[here] = range(call.start, call.start + len(call.tokens))
        at = here.stop
    at = 0
    for number, (_, call) in enumerate(entries[-1].calls):
        at += len(call.tokens)
        sampling = Sampling.of(call)
        now.last[number], now.next[number] = at - 1, call.start + len(call.tokens)
        now.temperature[number], now.seed[number] = sampling.temperature, sampling.seed
    return now
