"""How fast bytes go between host and device memory: alone, and in a loop inside jit."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import device_trace
import gpu_train


def measure(fragment: Any, tiny: bool) -> None:
    """Bandwidth of `device_put`, then of the loops, in bytes per second of each direction."""
    import jax

    fragment.add(device=jax.devices()[0].device_kind)
    sizes = [2**20, 2**22] if tiny else [2**26, 2**28, 2**30, 2**32]
    rows = []
    for size in sizes:
        rows.append({"bytes": size, **_device_put_rates(size, repeats=2 if tiny else 5)})
        fragment.add(device_put=rows)
        print(f"device_put {size / 2**20:.0f} MiB: {_gb(rows[-1])}", flush=True)
    peak = {way: max(row[way] for row in rows) for way in ("h2d", "d2h", "both")}
    fragment.add(peak=peak)
    stack = (4, 2**20) if tiny else (16, 2**28)
    pipelined = {"xla_gpu_enable_pipelined_host_offloading": True}
    forms: dict[str, dict[str, Any]] = {
        "both": {"kind": "both", "leaves": 8},
        "fetch": {"kind": "fetch", "leaves": 8},
        "store": {"kind": "store", "leaves": 8},
        "both, one array": {"kind": "both", "leaves": 1},
        "both, pipelined": {"kind": "both", "leaves": 8, "options": None if tiny else pipelined},
    }
    loops: dict[str, Any] = {}
    for name, form in forms.items():
        try:
            loops[name] = _loop_rates(*stack, **form, repeats=2 if tiny else 5)
        except (RuntimeError, ValueError) as problem:
            loops[name] = {"failed": gpu_train.last_words(str(problem) or type(problem).__name__)}
        fragment.add(loops=loops)
        print(f"loop {name}: {loops[name].get('failed') or _gb(loops[name])}", flush=True)


def _gb(row: dict[str, Any]) -> str:
    shown = [f"{way} {row[way] / 1e9:.1f}" for way in ("h2d", "d2h", "both") if row.get(way)]
    return f"{', '.join(shown)} GB/s"


def memories() -> tuple[Any, Any]:
    """Shardings of device memory and of pinned host memory."""
    import jax
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    return (
        SingleDeviceSharding(device, memory_kind="device"),
        SingleDeviceSharding(device, memory_kind="pinned_host"),
    )


def _device_put_rates(size: int, *, repeats: int) -> dict[str, float]:
    """Bytes per second to the device, to the host, and each way at once: the best of some calls."""
    import jax
    import jax.numpy as jnp

    there, here = memories()
    on_device = jax.device_put(jnp.arange(size // 4, dtype=jnp.float32), there)
    on_host = jax.device_put(on_device, here)
    calls = {
        "h2d": lambda: jax.device_put(on_host, there),
        "d2h": lambda: jax.device_put(on_device, here),
        "both": lambda: (jax.device_put(on_host, there), jax.device_put(on_device, here)),
    }
    return {way: size / _best_s(call, repeats) for way, call in calls.items()}


def _best_s(call: Callable[[], Any], repeats: int) -> float:
    import jax

    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        clock = common.Clock()
        done = jax.block_until_ready(call())
        seconds.append(clock.read()["wall_s"])
        del done
    return min(seconds)


def _loop_rates(
    rows: int,
    row_bytes: int,
    *,
    kind: str,
    leaves: int,
    repeats: int,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A loop over the rows of stacks in host memory, as the training step has them.

    Args:
        rows: Of each stack.
        row_bytes: Of a row of all stacks together.
        kind: `fetch` reads rows, `store` writes them, `both` reads, adds 1 and writes.
        leaves: Stacks.
        repeats: Of the loop.
        options: For the compiler.
    """
    import jax
    import jax.numpy as jnp

    there, here = memories()
    shape = (rows, row_bytes // 4 // leaves // 256, 256)
    stacks = [jax.device_put(jnp.full(shape, i, jnp.float32), here) for i in range(leaves)]
    loop = _loop(kind, rows)
    jitted = jax.jit(
        loop, donate_argnums=0, out_shardings=([here] * leaves, there), compiler_options=options
    )
    compiled = jitted.lower(stacks, jnp.float32(1)).compile()
    seconds = []
    for _ in range(repeats + 1):
        clock = common.Clock()
        stacks, total = jax.block_until_ready(compiled(stacks, jnp.float32(1)))
        seconds.append(clock.read()["wall_s"])
    with _profiled() as found:
        stacks, total = jax.block_until_ready(compiled(stacks, jnp.float32(1)))
    moved = rows * row_bytes
    best = min(seconds[1:])
    ways = {"fetch": ("h2d",), "store": ("d2h",), "both": ("h2d", "d2h")}[kind]
    return {
        "seconds": seconds,
        **dict.fromkeys(ways, moved / best),
        "bytes_each_way": moved,
        "right": _right(kind, stacks, total, rows=rows, turns=repeats + 2),
        "profile": found,
        "copy_engines": device_trace.carried(
            found,
            to_device=moved if "h2d" in ways else 0,
            to_host=moved if "d2h" in ways else 0,
        ),
    }


def _loop(kind: str, rows: int) -> Callable[[Any, Any], Any]:
    import jax
    import jax.numpy as jnp

    from colossax.offload import fetch, store

    def step(i: Any, carry: Any, one: Any) -> Any:
        stacks, total = carry
        if kind == "store":
            shapes = [stack.shape[1:] for stack in stacks]
            value = i.astype(jnp.float32) + one
            return store(stacks, [jnp.full(shape, value) for shape in shapes], i), total
        row = fetch(stacks, i)
        if kind == "fetch":
            return stacks, total + sum(jnp.mean(x) for x in row)
        return store(stacks, [x + one for x in row], i), total

    def loop(stacks: Any, one: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            return step(i, carry, one)

        return jax.lax.fori_loop(0, rows, body, (stacks, jnp.float32(0)))

    return loop


def _right(kind: str, stacks: list[Any], total: Any, *, rows: int, turns: int) -> bool:
    """Whether the last loop left what it should have."""
    import jax
    import jax.numpy as jnp

    there, _ = memories()
    if kind == "fetch":
        return bool(jnp.allclose(total, rows * sum(range(len(stacks))), rtol=1e-4))
    good = True
    for i, stack in enumerate(stacks):
        here = jax.device_put(stack, there)
        steps = jnp.arange(rows, dtype=jnp.float32)[:, None, None]
        wanted = i + turns if kind == "both" else steps + 1
        good = good and bool(jnp.all(here == wanted))
    return good


@contextlib.contextmanager
def _profiled() -> Iterator[dict[str, Any]]:
    """What the body did on the GPU, filled in at its end; `failed` where no profiler could start.

    The body has to wait for the device itself.
    """
    import jax

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder)
        except (RuntimeError, ValueError) as problem:
            found["failed"] = gpu_train.last_words(str(problem) or type(problem).__name__)
        yield found
        if "failed" not in found:
            jax.profiler.stop_trace()
            found.update(device_trace.summary(Path(folder)))
