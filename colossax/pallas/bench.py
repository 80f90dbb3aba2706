"""How kernels are measured: right first, then timed beside an anchor and the device's limits.

One case is one operation on one shape. Its implementations take turns; each is checked against
float64 before it is timed. Inputs are random and, where they would stay in a cache, of several
sets. The limits, a matmul and a copy, are measured in the same run.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CACHE_BYTES = 120 * 2**20
"""Inputs of fewer bytes are measured in `INPUT_SETS` sets by turns."""

INPUT_SETS = 3

ERROR_RATIO = 1.5
"""An implementation may be this much further from float64 than its anchor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: Of one repeat at least.
        repeats: Whose median is taken.
    """

    seconds: float = 0.2
    repeats: int = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on one shape.

    Attributes:
        kernel: Such as `attention forward`.
        shape: For people.
        flops: Needed, masked pairs left out.
        inputs: Arrays from a seed.
        functions: By implementation; each takes the inputs. The first is the one proven.
        anchor: Which of them the others are held against, or None.
        truth: What `error` compares with, in float64, from the inputs; computed once.
        error: Of an implementation's output: norm of the difference from the truth over the norm
            of that.
        tolerance: Greatest error that is right, whatever the anchor's.
        moved_bytes: Where memory is the limit, what must be read and written; 0: arithmetic is.
    """

    kernel: str
    shape: str
    flops: float
    inputs: Callable[[int], tuple[Any, ...]]
    functions: Mapping[str, Callable[..., Any]]
    anchor: str | None
    truth: Callable[[tuple[Any, ...]], Any]
    error: Callable[[str, Any, Any], float]
    tolerance: float
    moved_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation in one case.

    Attributes:
        kernel: Of the case.
        shape: Of the case.
        implementation: Its name.
        us: Microseconds of one call, median; None where it failed.
        spread: Of the repeats, highest less lowest over the median.
        tflops: 10^12 floating-point operations a second.
        of_limit: Share of the limit of this run: the matmul's or, where memory is it, the copy's.
        of_anchor: Rate over the anchor's in this case, None for the anchor itself.
        error: See `Case`.
        right: Whether the error is within the tolerance and at most 1.5 of the anchor's.
        failed: What was raised, or empty.
    """

    kernel: str
    shape: str
    implementation: str
    us: float | None = None
    spread: float | None = None
    tflops: float | None = None
    of_limit: float | None = None
    of_anchor: float | None = None
    error: float | None = None
    right: bool | None = None
    failed: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the device does at best in this run: FLOP/s of a matmul, bytes/s of a copy."""

    matmul_flops: float
    copy_bytes: float


def time_calls(
    functions: Mapping[str, Callable[..., Any]], sets: Sequence[tuple[Any, ...]], effort: Effort
) -> dict[str, list[float]]:
    """Seconds per call of each function, `effort.repeats` of them, the functions by turns.

    The calls of a repeat are all enqueued before the last is waited for.
    """
    calls = {}
    for name, function in functions.items():
        jax.block_until_ready(function(*sets[0]))
        once = _seconds(function, sets, 3) / 3
        calls[name] = max(3, round(effort.seconds / once))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(effort.repeats):
        for name, function in functions.items():
            seconds[name].append(_seconds(function, sets, calls[name]) / calls[name])
    return seconds


def _seconds(function: Callable[..., Any], sets: Sequence[tuple[Any, ...]], calls: int) -> float:
    start = time.perf_counter()
    out = None
    for call in range(calls):
        out = function(*sets[call % len(sets)])
    jax.block_until_ready(out)
    return time.perf_counter() - start


def measure_limits(effort: Effort, *, dtype: Any, size: int, copy_bytes: int) -> Limits:
    """The matmul of `size` squared random numbers, and a copy: bytes read plus bytes written."""
    keys = jax.random.split(jax.random.key(0), 2)
    a, b = (jax.random.normal(key, (size, size), dtype) for key in keys)
    matmul = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype))
    x = jax.random.normal(keys[0], (copy_bytes // 4,), jnp.float32)
    # Negating keeps XLA from giving back the same buffer.
    times = time_calls({"copy": jax.jit(jnp.negative)}, [(x,)], effort)["copy"]
    products = time_calls({"matmul": matmul}, [(a, b)], effort)["matmul"]
    return Limits(
        matmul_flops=2 * size**3 / statistics.median(products),
        copy_bytes=2 * x.nbytes / statistics.median(times),
    )


def measure(case: Case, limits: Limits, effort: Effort) -> Iterator[Row]:
    """Check and time one case; an implementation that fails is a row that says so."""
    sets = _input_sets(case)
    truth = case.truth(sets[0])
    errors, failed = {}, {}
    for name, function in case.functions.items():
        try:
            errors[name] = case.error(name, truth, jax.block_until_ready(function(*sets[0])))
        except (RuntimeError, ValueError, TypeError) as problem:
            failed[name] = f"{type(problem).__name__}: {problem}".splitlines()[0][:300]
    times = time_calls({name: case.functions[name] for name in errors}, sets, effort)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    anchor_s = None if case.anchor is None else medians.get(case.anchor)
    allowed = min(case.tolerance, ERROR_RATIO * errors.get(case.anchor or "", np.inf))
    for name in case.functions:
        named: Any = {"kernel": case.kernel, "shape": case.shape, "implementation": name}
        if name in failed:
            yield Row(**named, failed=failed[name])
            continue
        seconds = medians[name]
        of_anchor = None if anchor_s is None or name == case.anchor else anchor_s / seconds
        yield Row(
            **named,
            us=seconds * 1e6,
            spread=(max(times[name]) - min(times[name])) / seconds,
            tflops=case.flops / seconds / 1e12,
            of_limit=_least_seconds(case, limits) / seconds,
            of_anchor=of_anchor,
            error=errors[name],
            right=bool(errors[name] <= allowed),
        )


def _least_seconds(case: Case, limits: Limits) -> float:
    if case.moved_bytes:
        return case.moved_bytes / limits.copy_bytes
    return case.flops / limits.matmul_flops


def _input_sets(case: Case) -> list[tuple[Any, ...]]:
    """One, or several where one would stay in a cache."""
    first = case.inputs(0)
    if sum(x.nbytes for x in jax.tree.leaves(first)) >= CACHE_BYTES:
        return [first]
    return [first, *(case.inputs(seed) for seed in range(1, INPUT_SETS))]


def tolerance(dtype: Any) -> float:
    """Greatest relative error of sums of products of random numbers in a dtype."""
    return {2: 1e-2, 4: 1e-4}[jnp.dtype(dtype).itemsize]


def relative_error(computed: Any, truth: Any) -> float:
    """Norm of the difference over the norm of the truth; infinite where something is NaN."""
    difference = np.asarray(computed, np.float64) - truth
    error = float(np.linalg.norm(difference) / np.linalg.norm(truth))
    return error if np.isfinite(error) else float("inf")
