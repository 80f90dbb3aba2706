"""What a kernel is tried on: small cases against the truth, a larger one against its peers too."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from colossax.pallas.bench import Effort, relative_error, time_calls

from .verdict import Outcome, Verdict

ROW_RATIO = 3.0
"""A row may be this much further off than all together: what is wrong may be one row."""

_EFFORT = Effort(seconds=0.05, repeats=5)
_FAILURES = (RuntimeError, ValueError, TypeError)
"""What compiling and running a kernel raises."""

_OF_MEMORY = ("out of memory", "failed to allocate", "alloc_failed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One case.

    Attributes:
        name: For people.
        inputs: Arrays.
        kernel: What is tried; from the inputs, arrays by name.
        truth: The same by XLA in float32, from inputs in float32.
        tolerance: Of `relative_error`.
        peers: Implementations that the kernel is timed against, or none.
    """

    name: str
    inputs: tuple[Any, ...]
    kernel: Callable[..., Mapping[str, Any]]
    truth: Callable[..., Mapping[str, Any]]
    tolerance: float
    peers: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)


def prove(trials: Iterable[Trial]) -> Verdict:
    """The first fault of a kernel, or its times in the last trial that has peers."""
    times: dict[str, tuple[float, ...]] = {}
    for trial in trials:
        try:
            truth = _truth(trial)
        except _FAILURES as problem:
            return Verdict.undecided(f"{trial.name}: XLA, the truth, failed: {_line(problem)}")
        try:
            fault = _fault(trial, truth)
            times = _times(trial) if trial.peers and fault is None else times
        except _FAILURES as problem:
            return _failed(trial, problem)
        if fault is not None:
            return Verdict.declined(f"{trial.name}: {fault}")
    seconds = times.pop("", ())
    return Verdict(outcome=Outcome.PROVED, seconds=seconds, peers=times)


def of_memory(text: str) -> bool:
    """Whether a message is about memory that was not there."""
    return any(phrase in text.lower() for phrase in _OF_MEMORY)


def _truth(trial: Trial) -> Mapping[str, Any]:
    with jax.default_matmul_precision("highest"):
        return jax.device_get(jax.jit(trial.truth)(*_wide(trial.inputs)))


def _fault(trial: Trial, truth: Mapping[str, Any]) -> str | None:
    """What is wrong with the kernel's values."""
    outputs = jax.device_get(jax.jit(trial.kernel)(*trial.inputs))
    for name, wanted in truth.items():
        one, wanted = (np.asarray(x, np.float64) for x in (outputs[name], wanted))
        error, row = relative_error(one, wanted), _worst_row(one, wanted)
        if not error <= trial.tolerance:
            return f"{name} is off by {error:.2g} of its norm, more than {trial.tolerance:g}"
        if not row <= ROW_RATIO * trial.tolerance:
            limit = ROW_RATIO * trial.tolerance
            return f"a row of {name} is off by {row:.2g} of its norm, more than {limit:g}"
    return None


def _worst_row(computed: np.ndarray, truth: np.ndarray) -> float:
    """Greatest distance of a vector along the last dim, over its norm or the usual one."""
    norms = np.linalg.norm(truth, axis=-1)
    usual = np.sqrt(np.mean(norms**2))
    return float(np.max(np.linalg.norm(computed - truth, axis=-1) / np.maximum(norms, usual)))


def _wide(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    narrow = jax.numpy.bfloat16, jax.numpy.float16
    return tuple(x.astype(jax.numpy.float32) if x.dtype in narrow else x for x in inputs)


def _times(trial: Trial) -> dict[str, tuple[float, ...]]:
    """Seconds of the kernel, under the empty name, and of the peers that run."""
    functions = {"": jax.jit(trial.kernel)}
    for name, peer in trial.peers.items():
        try:
            jax.block_until_ready(jax.jit(peer)(*trial.inputs))
        except _FAILURES as problem:
            if of_memory(str(problem)):
                raise
            continue  # no peer here; the kernel is right all the same
        functions[name] = jax.jit(peer)
    times = time_calls(functions, [trial.inputs], _EFFORT)
    return {name: tuple(seconds) for name, seconds in times.items()}


def _failed(trial: Trial, problem: Exception) -> Verdict:
    if of_memory(str(problem)):
        return Verdict.undecided(f"{trial.name}: device memory was short ({_line(problem)})")
    return Verdict.declined(f"{trial.name}: {type(problem).__name__}: {_line(problem)}")


def _line(problem: Exception) -> str:
    return str(problem).partition("\n")[0][:300]
