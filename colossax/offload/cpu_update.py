"""An optimizer update of which the CPU takes some layers while the device streams the others.

Off unless measured: `cpu_share` says from rates whether it pays, and is 0 where it does not. It
runs beside jitted programs, not within one: inside a loop that carries host memory, XLA refuses
computations on the host.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Sharding

from colossax.errors import InputError

RowUpdate = Callable[[Any, Any, Any], Any]
"""`(row, gradient, scalars) -> row`, jitted: what is kept of one layer, a step later."""

WINDOW = 2
"""Layers on the device at a time: one is updated while the next arrives."""


def cpu_rows(count: int, share: float) -> tuple[int, ...]:
    """Which of `count` layers the CPU updates: the nearest number to the share, evenly spread.

    The same ones every step, so that they may be kept where the CPU computes.

    Raises:
        InputError: The share is not from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise InputError(f"share: found {share}; give a share of the layers, from 0 to 1")
    taken = round(share * count)
    return tuple(i for i in range(count) if (i + 1) * taken // count > i * taken // count)


def split_update(
    update: RowUpdate,
    rows: Sequence[Any],
    grads: Sequence[Any],
    scalars: Any,
    *,
    share: float,
    cpu: jax.Device,
) -> list[Any]:
    """`update` of every row, some by JAX's CPU backend in a thread, the others by the device.

    A row comes back where it was, memory kind and sharding included. Rows of `cpu_rows` that lie
    on `cpu` are not copied; of others, states travel with them.

    Args:
        update: Must give a row of the same structure and depend on no context of JAX, as for
            precision or a plan: those do not reach other threads. What it donates of a row that
            lies where it is updated is gone for the caller.
        rows: What is kept of each layer, arrays of one process.
        grads: Of each layer.
        scalars: The same for all, such as the step.
        share: Of the layers, how many the CPU updates. 0 starts no thread.
        cpu: A device of the CPU backend.

    Raises:
        InputError: Rows and gradients are not as many, a row for the CPU is not of this process
            alone, or the share is none.
        Exception: What `update` raises, in the thread or outside it; no thread is left then.

    Cost: on the device, up to `WINDOW` rows and gradients; on the host, one row beside those kept.
    """
    if len(rows) != len(grads):
        raise InputError(f"grads: found {len(grads)} for {len(rows)} rows; give one to each row")
    chosen = cpu_rows(len(rows), share)
    _check_addressable(rows, grads, chosen)
    others = [i for i in range(len(rows)) if i not in chosen]
    new: list[Any] = [None] * len(rows)

    def on_cpu(stop: threading.Event) -> None:
        for i in chosen:
            if stop.is_set():
                return
            whole = jax.device_put((rows[i], grads[i], scalars), cpu)
            # One at a time: enqueued together, their copies would all be in memory.
            new[i] = jax.block_until_ready(_updated(update, whole, rows[i]))

    with _beside(on_cpu if chosen else None):
        for i, row in _on_device(update, rows, grads, scalars, others):
            new[i] = row
    return new


def _on_device(
    update: RowUpdate, rows: Sequence[Any], grads: Sequence[Any], scalars: Any, which: Iterable[int]
) -> Iterator[tuple[int, Any]]:
    """Updated rows, of which at most `WINDOW` are under way."""
    under_way: deque[Any] = deque()
    for i in which:
        if len(under_way) == WINDOW:
            jax.block_until_ready(under_way.popleft())
        kept = jax.tree.map(lambda x: jax.device_put(x, _in_compute_memory(x.sharding)), rows[i])
        grad = jax.tree.map(lambda x: jax.device_put(x, _in_compute_memory(x.sharding)), grads[i])
        row = _updated(update, (kept, grad, scalars), rows[i])
        under_way.append(row)
        yield i, row


def _updated(update: RowUpdate, given: tuple[Any, Any, Any], row: Any) -> Any:
    """The updated row, put where the row is."""
    there = jax.tree.map(lambda x: x.sharding, row)
    return jax.device_put(update(*given), there)


def _in_compute_memory(sharding: Sharding) -> Sharding:
    device = next(iter(sharding.device_set))
    return sharding.with_memory_kind(device.default_memory().kind)


@contextlib.contextmanager
def _beside(work: Callable[[threading.Event], None] | None) -> Iterator[None]:
    """Run `work` in a thread until the body and it are done; what either raises is raised.

    Where the body fails, the work is told to stop.
    """
    if work is None:
        yield
        return
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu-update") as pool:
        future = pool.submit(work, stop)
        try:
            yield
            future.result()
        finally:
            stop.set()


def _check_addressable(rows: Sequence[Any], grads: Sequence[Any], which: Iterable[int]) -> None:
    for i in which:
        if not all(x.is_fully_addressable for x in jax.tree.leaves((rows[i], grads[i]))):
            raise InputError(
                f"rows[{i}]: spans several processes, whose CPUs cannot share it; give each"
                f" process rows of its own, or share=0"
            )
