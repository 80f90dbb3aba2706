"""Which of several implementations of an operation runs."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from .proof import PROVER, Variant, Verdict
from .target import Target

_LOG = logging.getLogger(__name__)

Verdicts = Callable[[Variant, str], Verdict]
"""On a variant of a kernel, and a kind of device."""


def choose(
    operation: str,
    implementations: Mapping[str, ModuleType],
    spec: Any,
    target: Target,
    implementation: str = "auto",
    *,
    unproven: str | None = None,
    verdicts: Verdicts | None = None,
) -> str:
    """Name of the implementation that will run.

    Args:
        operation: What it is called in messages.
        implementations: By name, fastest first; each has `why_not(spec, target)`, None or the
            reason why it declines. One called `interpret` runs only if named, and so does one with
            a reason from `why_slow(target)`, where it has that function.
        spec: Static facts of the call; its text is what the log calls it.
        target: The hardware.
        implementation: `auto` for the first that accepts, or a name.
        unproven: The one that `auto` takes on a device that is there only once the kernels for
            `spec.variant` have proved themselves on it.
        verdicts: Who says so; by default this process's `proof.PROVER`.

    Raises:
        ValueError: No such name.
        NotImplementedError: The one named declines.
        ExceptionGroup: All decline.
    """
    names = ("auto", *implementations)
    if implementation not in names:
        raise ValueError(f"{operation}: no implementation '{implementation}'; use one of {names}")
    if implementation == "auto":
        automatic = {n: one for n, one in implementations.items() if n != "interpret"}
        answers = reasons(automatic, spec, target, unproven=unproven, verdicts=verdicts)
    else:
        answers = {implementation: implementations[implementation].why_not(spec, target)}
    chosen = next((name for name, why in answers.items() if why is None), None)
    if chosen is not None:
        faster = list(answers.items())[: list(answers).index(chosen)]
        _log_once(operation, str(spec), chosen, "; ".join(f"not {n}: {why}" for n, why in faster))
        return chosen
    declines = [
        NotImplementedError(f"{operation} '{name}': {why}") for name, why in answers.items()
    ]
    if implementation != "auto":
        raise declines[0]
    raise ExceptionGroup(f"{operation}: no implementation takes this call", declines)


def reasons(
    implementations: Mapping[str, ModuleType],
    spec: Any,
    target: Target,
    *,
    unproven: str | None = None,
    verdicts: Verdicts | None = None,
) -> dict[str, str | None]:
    """Why `auto` would not take each implementation, None where it accepts; fastest first.

    Arguments are those of `choose`.
    """
    answers = {name: _why_left(one, spec, target) for name, one in implementations.items()}
    if unproven in answers and answers[unproven] is None and target.device_kind is not None:
        verdict = (verdicts or PROVER.verdict)(spec.variant, target.device_kind)
        peers = (name for name, why in answers.items() if name != unproven and why is None)
        answers[unproven] = verdict.why_not(next(peers, None))
    return answers


@dataclasses.dataclass(frozen=True)
class Choice:
    """`choose` and `reasons` of one operation.

    Attributes:
        operation, implementations, unproven: As of `choose`.
    """

    operation: str
    implementations: Mapping[str, ModuleType]
    unproven: str

    def choose(self, spec: Any, target: Target, implementation: str = "auto") -> str:
        """Name of the implementation that will run.

        Args:
            spec: Static facts of a call.
            target: The hardware.
            implementation: `auto` for the first that accepts, or a name.

        Raises:
            ValueError: No such name.
            NotImplementedError: The one named declines.
            ExceptionGroup: All decline.
        """
        given = self.operation, self.implementations, spec, target, implementation
        return choose(*given, unproven=self.unproven)

    def declined_by(
        self, spec: Any, target: Target, *, verdicts: Verdicts | None = None
    ) -> dict[str, str | None]:
        """Of each implementation, fastest first: why `auto` would not take it, None: it would.

        Args:
            spec: Static facts of a call.
            target: The hardware.
            verdicts: Whether kernels have proved themselves; by default what this process knows.
        """
        return reasons(
            self.implementations, spec, target, unproven=self.unproven, verdicts=verdicts
        )


def _why_left(one: Any, spec: Any, target: Target) -> str | None:
    slow = getattr(one, "why_slow", None)
    return one.why_not(spec, target) or (slow and slow(target))


@functools.lru_cache(maxsize=1024)
def _log_once(operation: str, call: str, name: str, declined: str) -> None:
    _LOG.info("%s of %s: %s%s", operation, call, name, f" ({declined})" if declined else "")
