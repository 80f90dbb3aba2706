"""Where a verdict comes from: memory, disk, process 0 of the job, or a child process."""

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from colossax import compat

from . import store
from .runner import COMMAND, try_variants
from .verdict import Outcome, Variant, Verdict

_LOG = logging.getLogger(__name__)

LIMIT_S = 60.0
"""Longest that a program waits for all its proofs; in a check, for each."""

WAIT_S = 300.0
"""Longest that other processes wait for process 0, which may come later to the same call."""

_LEAST_S = 5.0
"""A child that has less does not even start."""

_AT_ONCE = 8
"""Variants that one child tries in a check: starting it takes as long as trying one."""


class Prover:
    """Verdicts of this process on kernels, for programs that it traces.

    Processes of one job must trace the same program: process 0 finds the verdict, the others wait
    for it in the job's key-value store, and the first that is written there holds for all, also
    when one has waited too long. All devices of a job are taken to be of one kind.

    Args:
        command: The child that tries kernels.
        limit_s: See `LIMIT_S`.
        wait_s: See `WAIT_S`.
        sources: What is hashed: kernels and their cases.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = COMMAND,
        limit_s: float = LIMIT_S,
        wait_s: float = WAIT_S,
        sources: Sequence[Path] = store.SOURCES,
    ):
        self._command = tuple(command)
        self._limit_s = limit_s
        self._wait_s = wait_s
        self._sources = tuple(sources)
        self._spent_s = 0.0
        self._known: dict[tuple[str, int, Variant], Verdict] = {}
        self._lock = threading.Lock()

    def verdict(self, variant: Variant, device_kind: str) -> Verdict:
        """On one variant, found where it is not known: takes up to `limit_s` in all."""
        where = store.circumstances(device_kind, self._sources)
        number, processes = compat.place_in_job()
        key = (where.digest, processes, variant)
        with self._lock:
            if key not in self._known:
                if processes == 1:
                    verdict = self._local_verdict(variant, where)
                else:
                    verdict = self._agreed(variant, where, first=number == 0)
                _LOG.log(
                    logging.INFO if verdict.outcome is Outcome.PROVED else logging.WARNING,
                    "%s on %s: %s",
                    variant,
                    device_kind,
                    verdict.text,
                )
                self._known[key] = verdict
            return self._known[key]

    def kept(self, variant: Variant, device_kind: str) -> Verdict | None:
        """The verdict on disk, if there is one."""
        return store.load(variant, store.circumstances(device_kind, self._sources))

    def prove_all(
        self, variants: Iterable[Variant], device_kind: str, *, total_s: float
    ) -> Iterator[tuple[Variant, Verdict]]:
        """Verdicts on many: those not proved yet are tried, again if they were declined.

        Stops where `total_s` are over or nothing can be tried; no other process is asked.
        """
        where = store.circumstances(device_kind, self._sources)
        left = []
        for one in variants:
            kept = store.load(one, where)
            if kept is None or kept.outcome is not Outcome.PROVED:
                left.append(one)
            else:
                yield one, kept
        deadline = time.monotonic() + total_s
        while left and time.monotonic() < deadline:
            verdicts = self._try(left[:_AT_ONCE], where, self._limit_s)
            yield from verdicts.items()
            left = [one for one in left if one not in verdicts]
            if all(one.outcome is Outcome.UNDECIDED for one in verdicts.values()):
                return

    def _agreed(self, variant: Variant, where: store.Circumstances, *, first: bool) -> Verdict:
        """The verdict that the job's processes share."""
        key = f"colossax/kernels/{where.digest}/{variant}"
        told = None if first else compat.hear_job(key, self._wait_s)
        if told is None and first:
            told = compat.tell_job(key, json.dumps(self._local_verdict(variant, where).to_json()))
        elif told is None:
            late = Verdict.undecided(
                f"process 0 gave no verdict within {self._wait_s:g} s: it came too late to this"
                f" call, does not make it, or has another kind of device"
            )
            told = compat.tell_job(key, json.dumps(late.to_json()))
        return Verdict.from_json(json.loads(told))

    def _local_verdict(self, variant: Variant, where: store.Circumstances) -> Verdict:
        """From disk, else found in what is left of the time."""
        kept = store.load(variant, where)
        if kept is not None:
            return kept
        left_s = self._limit_s - self._spent_s
        if left_s < _LEAST_S:
            return Verdict.undecided(
                f"the proofs of this run have taken their {self._limit_s:g} s; it is tried in the"
                f" next one, or by colossax check"
            )
        _LOG.info("%s is tried on %s, in up to %.0f s", variant, where.device_kind, left_s)
        return self._try([variant], where, left_s)[variant]

    def _try(
        self, variants: Sequence[Variant], where: store.Circumstances, limit_s: float
    ) -> dict[Variant, Verdict]:
        began = time.monotonic()
        verdicts = try_variants(
            variants,
            where.device_kind,
            limit_s=limit_s,
            decisive=limit_s == self._limit_s,
            command=self._command,
        )
        self._spent_s += time.monotonic() - began
        for variant, verdict in verdicts.items():
            if verdict.outcome is not Outcome.UNDECIDED:
                store.save(variant, where, verdict)
        return verdicts


PROVER = Prover()
"""Of this process."""
