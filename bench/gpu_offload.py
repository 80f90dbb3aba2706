"""Training with layers in host memory on one GPU, beside what copies alone and memory alone reach.

    python bench/gpu_offload.py [--parts copies,adamw4b] [--out DIR] [--again]

Parts, each a process of its own with a time limit, and a file DIR/PART.json written as it goes. A
part whose file is complete is left out unless `--again`; DIR/gpu_offload.json and the table have
all that is there. A part for which `--limit-s` leaves no time is left for the next call.

copies     `device_put` both ways, pinned, alone and at once; then a loop inside jit that fetches
           the rows of a stack in host memory, changes and stores them. A profile of it says who
           moved the bytes: copy engines, or kernels.
rates      what `colossax bench offload` measures.
adamw4b    4 B, all layers in host memory, state float32 (12 bytes a parameter).
adamw14b   14 B, half of the layers in host memory, state float32.
adamw16b   16 B, half of the layers, state mixed (10 bytes).
lomo65b    65 B in bfloat16 by SGD without momentum, updated during backward, half of the layers.
peers      layers of 4 B and 14 B, fewer of them, wholly in device memory, the ordinary step.
pipelined  losses of a small stack in host memory, without and with transfers that the compiler
           moves across iterations (`plan.offload.pipelined`): whether they are the same. Only
           where `--parts` names it.

Models have Llama's form: heads of 128, 8 of keys and values, vocabulary 32000, rows of 4096 tokens,
bf16 matmuls, every layer recomputed. Tokens count up in one fixed batch, so that they can be learnt
and the loss has to fall. AdamW runs without clipping and then, from the same state, with the
global norm found in a pass of its own (`two_pass`).

Model FLOPs per token are
    6 (weights of all matmuls, head included) + 6 layers heads head_dim (seq + 1)
and MFU is tokens/s x that / 989e12: causal scores counted by half, recomputation and the second
pass never. The rate of a layer is compared with the same layer in device memory by
    seconds per layer = (step at 12 layers - step at 4 layers) / 8
    ratio = seconds per layer x layers / (offloaded step - (step at 4 - 4 seconds per layer)).

Host memory is pinned in one piece before anything else lies there, since its pool cannot join
pieces; its limit is set in the environment of each process, before JAX is imported.

Imports neither grain nor tyro. `--tiny` runs every part in toy sizes, on a CPU too. `--aot` counts
the bytes of every case by compiling for an H200 that is not there, which needs colossax[aot].
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import gpu_train
import offload_copies
from offload_cases import (
    ASSUMED,
    CASES,
    GIB,
    PEER_LAYERS,
    PEER_OF,
    PEER_STEPS,
    PEERS,
    TINY_PEERS,
    Case,
    batch_of,
    build,
    host_bytes,
    planned_s,
    pool_gib,
    sizes_of,
    state_host_bytes,
)

WARM_UP = 1
LIMIT_S = 590.0
PATIENCE = 2.0
"""A part is ended after this many times its planned seconds."""

DEVICE_GIB, HOST_GIB = 140.0, 112.0
BARS = {
    "loop_of_device_put": 0.85,
    "aot_of_peak": 0.03,
    "layer_of_in_memory": 0.85,
    "model_tflops_14b": 350.0,
}
PUBLIC = "Elixir: 0.84 of in-memory throughput on one A100-40GB"
PARTS = ("copies", "rates", "adamw4b", "peers", "adamw14b", "lomo65b", "adamw16b")
KNOWN = (*PARTS, "pipelined")
"""The last only where `--parts` names it: the others take ten minutes."""


def main() -> int:
    arguments = _arguments()
    if arguments.worker:
        fragment = Fragment(arguments.out / f"{arguments.worker}.json", arguments.worker)
        _measure(arguments.worker, fragment, arguments)
        fragment.add(complete=True)
        return 0
    if arguments.aot:
        return _aot(arguments)
    _require_packages()
    with contextlib.ExitStack() as stack:
        out = arguments.out
        if out is None and arguments.tiny:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        out = out or common.HERE / "results" / "gpu_offload"
        return _run_parts(arguments, out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", type=_parts, default=PARTS, help=",".join(KNOWN))
    parser.add_argument("--out", type=Path, help="default: results/gpu_offload beside this script")
    parser.add_argument("--again", action="store_true", help="also parts that are complete")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all parts together")
    parser.add_argument("--host-gib", type=float, default=HOST_GIB, help="that may be pinned")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, any device")
    parser.add_argument("--aot", action="store_true", help="count bytes for an H200, run nothing")
    parser.add_argument("--worker", choices=KNOWN, help=argparse.SUPPRESS)
    return parser.parse_args()


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in KNOWN:
            raise argparse.ArgumentTypeError(f"unknown part '{name}'; choose from {KNOWN}")
    return names


def _require_packages() -> None:
    """End with one sentence where a package is missing or does not fit this JAX."""
    sys.path.insert(0, str(common.REPOSITORY))
    for name in ("jaxtyping", "optax", "flax"):
        if importlib.util.find_spec(name) is None:
            sys.exit(
                f"gpu_offload: {name} is not installed here; put wheels that fit this JAX into a"
                f" folder (flax 0.12.12 fits JAX 0.11 and later) and name it in PYTHONPATH"
            )


# Parts, one process after another


class Fragment:
    """What is known of a part so far, in its file."""

    def __init__(self, path: Path, part: str):
        self.path = path
        self.facts: dict[str, Any] = {"part": part, "complete": False}
        self.add(hardware=common.hardware(), versions=common.versions())

    def add(self, **facts: Any) -> None:
        """Write with these facts besides."""
        self.facts.update(facts)
        common.write_json(self.path, self.facts)


def _run_parts(arguments: argparse.Namespace, out: Path) -> int:
    """Measure what is missing, as long as there is time, and show what is there."""
    started, failed = time.perf_counter(), 0
    for part in arguments.parts:
        path = out / f"{part}.json"
        if not arguments.again and _read(path).get("complete"):
            print(f"{part}: is there already", flush=True)
            continue
        left = arguments.limit_s - (time.perf_counter() - started)
        planned = planned_s(part)
        if planned > left and not arguments.tiny:
            print(f"{part}: needs {planned:.0f} s, {left:.0f} s are left; not run", flush=True)
            continue
        problem = _run_part(part, arguments, out, min(PATIENCE * planned, left))
        if problem:
            failed += 1
            common.write_json(path, {"part": part, **_read(path), "failed": problem})
            print(f"{part}: {problem}", flush=True)
    found = {part: _read(out / f"{part}.json") for part in KNOWN}
    found = {part: facts for part, facts in found.items() if facts}
    result = {
        "benchmark": "gpu_offload",
        "tiny": arguments.tiny,
        "bars": BARS,
        "public": PUBLIC,
        "assumed": ASSUMED,
        "flops_per_token": "6 weights + 6 layers heads head_dim (seq + 1)",
        "parts": found,
        "verdicts": verdicts(found),
    }
    common.write_json(out / "gpu_offload.json", result)
    print(_report(result))
    return 1 if failed else 0


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _run_part(part: str, arguments: argparse.Namespace, out: Path, limit_s: float) -> str | None:
    """Run a part in a process of its own; what went wrong, if anything."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{part}.json").unlink(missing_ok=True)
    words = ["--worker", part, "--out", str(out), "--host-gib", str(arguments.host_gib)]
    words += ["--tiny"] if arguments.tiny else []
    try:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), *words],
            env=environment(part, arguments.tiny),
            timeout=limit_s,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"no end within {limit_s:.0f} s"
    if done.returncode:
        sys.stderr.write(done.stderr[-3000:])
        return f"exit code {done.returncode}: {gpu_train.last_words(done.stderr or 'no message')}"
    return None


def environment(part: str, tiny: bool) -> dict[str, str]:
    """Of a part's process: the pool of host memory must be limited before JAX is imported."""
    paths = [str(common.REPOSITORY), str(common.HERE), os.environ.get("PYTHONPATH", "")]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(1 if tiny else pool_gib(part)),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        found["JAX_PLATFORMS"] = f"{platforms},cpu"  # its rate is measured as well
    return found


def memory_of_host() -> dict[str, float]:
    """GiB of memory: all of it, and what may still be taken."""
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    lines = [line.split() for line in text.splitlines()]
    sizes = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    return {
        name: round(sizes[name] * 1024 / GIB, 1)
        for name in ("MemTotal", "MemAvailable")
        if name in sizes
    }


# What a worker does


def _measure(part: str, fragment: Fragment, arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    if "jax" in sys.modules:
        raise RuntimeError("jax is imported already, and takes no limit of host memory now")
    fragment.add(host_pool_gb=os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"])
    if part == "copies":
        offload_copies.measure(fragment, arguments.tiny)
    elif part == "rates":
        _rates(fragment, arguments.tiny)
    elif part == "pipelined":
        _pipelined(fragment, arguments.tiny)
    elif part == "peers":
        _peers(fragment, arguments.tiny)
    else:
        _offloaded(part, fragment, arguments)
    fragment.add(process_s=time.perf_counter() - started, planned_s=planned_s(part))


def _rates(fragment: Fragment, tiny: bool) -> None:
    """The rates that plans with host memory are made from, kept beside the fragment as well."""
    import jax.numpy as jnp

    from colossax.cli.benching.offload import updates
    from colossax.offload import Setting, cpu_share, hiding_tokens, measure_rates, save_rates
    from colossax.pallas.bench import Effort

    setting = None
    if tiny:
        setting = Setting(
            copy_bytes=2**16,
            cpu_parameters=2**10,
            device_parameters=2**10,
            matmul=64,
            matmul_dtype=jnp.float32,
            effort=Effort(seconds=0.001, repeats=2),
        )
    found = measure_rates(updates(), setting)
    path = save_rates(found, fragment.path.parent / "rates.of_machine.json")
    moved = {update.name: update.bytes_per_direction for update in found.updates}
    fragment.add(
        rates=dataclasses.asdict(found),
        file=path.name,
        cpu_share={name: cpu_share(found, size) for name, size in moved.items()},
        hiding_tokens={name: hiding_tokens(found, size) for name, size in moved.items()},
    )
    print(f"rates: matmul {found.matmul_flops_per_s / 1e12:.0f} TFLOP/s", flush=True)


def _pipelined(fragment: Fragment, tiny: bool) -> None:
    """The test that `colossax bench offload` runs on a GPU."""
    import jax

    from colossax.planner.loss_equality import MODEL, STEPS, TOLERANCE, check_pipelined

    device = jax.devices()[0]
    small = dataclasses.replace(MODEL, embed=32, layers=2, heads=2, kv_heads=2, mlp=48, max_seq=16)
    found = check_pipelined(device, model=small if tiny else MODEL, steps=3 if tiny else STEPS)
    facts = dataclasses.asdict(found)
    fragment.add(device=device.device_kind, test=facts, tolerance=TOLERANCE)
    print(f"pipelined: {'passed' if found.passed else 'FAILED'}, {found.shown}", flush=True)


def _offloaded(part: str, fragment: Fragment, arguments: argparse.Namespace) -> None:
    """Steps of a case, its clippings one after another from one state."""
    case, tiny = CASES[part], arguments.tiny
    needed, memory = host_bytes(case) / GIB, memory_of_host()
    fragment.add(case=dataclasses.asdict(case), host_gib=needed, memory_gib=memory)
    print(f"{part}: {needed:.1f} GiB of host memory, of {memory}", flush=True)
    if needed > arguments.host_gib and not tiny:
        raise RuntimeError(f"{needed:.1f} GiB are above --host-gib {arguments.host_gib}")
    import jax

    devices = jax.devices()[:1]
    fragment.add(device=devices[0].device_kind, pinned=_pin(2**20 if tiny else host_bytes(case)))
    steps = {clipping: build(case, clipping, devices, tiny) for clipping, _ in case.runs}
    clock = common.Clock()
    first = next(iter(steps.values()))
    state = jax.block_until_ready(first.init(0))
    fragment.add(
        init_s=clock.read()["wall_s"],
        init_peak_bytes=_peak_bytes(devices[0]),
        parameters=first.spec.parameter_count(),
        **_bytes_by_memory(state),
        state_host_bytes_counted=state_host_bytes(case, sizes_of(case, tiny)),
    )
    runs: list[dict[str, Any]] = []
    for clipping, count in case.runs:
        row, state = _steps(case, steps[clipping], state, count, tiny)
        before = runs[-1]["losses"][-1] if runs else row["losses"][0]
        row |= {"loss_before": before, "falls": row["losses"][-1] < before}
        runs.append({"clipping": clipping, "aot_gib": case.aot_gib.get(clipping), **row})
        fragment.add(runs=runs)
        print(f"{part} {clipping}: {_said(row)}", flush=True)


def _said(row: dict[str, Any]) -> str:
    losses = " ".join(f"{loss:.3f}" for loss in row["losses"])
    return f"{row['step_s']:.2f} s, {row['flops_per_s'] / 1e12:.0f} TFLOP/s, losses {losses}"


def _pin(size: int) -> dict[str, Any]:
    """Take the pool's memory in one piece and give it back to the pool."""
    import jax
    import jax.numpy as jnp

    from colossax.offload import new_stack

    _, here = offload_copies.memories()
    row = jax.ShapeDtypeStruct((2**20,), jnp.uint8)
    clock = common.Clock()
    try:
        taken = jax.jit(lambda: new_stack(size >> 20, row, host=True), out_shardings=here)()
        jax.block_until_ready(taken).delete()
    except (RuntimeError, ValueError) as problem:
        return {"failed": gpu_train.last_words(str(problem) or type(problem).__name__)}
    return {"bytes": size, "seconds": clock.read()["wall_s"]}


def _steps(case: Case, step: Any, state: Any, count: int, tiny: bool) -> tuple[dict[str, Any], Any]:
    """Compile a step, take it so often, and say what came of it."""
    import jax

    device = jax.devices()[0]
    batch = step.place(batch_of(case, tiny))
    clock = common.Clock()
    compiled = step.jitted.lower(state, batch).compile()
    compile_s = clock.read()["wall_s"]
    losses, seconds = [], []
    for _ in range(count):
        clock = common.Clock()
        state, metrics = jax.block_until_ready(compiled(state, batch))
        seconds.append(clock.read()["wall_s"])
        losses.append(float(metrics["loss"]))
    rows, seq = batch["tokens"].shape
    median = statistics.median(seconds[WARM_UP:] or seconds)
    flops = gpu_train.flops_per_token(sizes_of(case, tiny)) * rows * seq / median
    row = {
        "compile_s": compile_s,
        "steps_s": seconds,
        "step_s": median,
        "tokens": rows * seq,
        "tokens_per_s": rows * seq / median,
        "flops_per_s": flops,
        "mfu": _mfu(flops, device.device_kind),
        "losses": losses,
        "skipped": float(metrics["skipped"]),
        "attention": _attention(compiled.as_text()),
        **_bytes_of(compiled.memory_analysis()),
        "peak_bytes": _peak_bytes(device),
    }
    return row, state


def _mfu(flops_per_s: float, device_kind: str) -> float | None:
    from colossax.planner.counting.flops import peak_flops

    peak = peak_flops(device_kind, "bfloat16")
    return None if peak is None else flops_per_s / peak


def _attention(hlo: str) -> str:
    return "cudnn" if "__cudnn$fmha" in hlo else "mosaic" if "mosaic_gpu" in hlo else "xla"


def _bytes_of(stats: Any) -> dict[str, int | None]:
    """What the compiled program needs of each memory; the compiler's own peak adds them up."""
    if stats is None:
        return {"device_bytes": None, "host_bytes": None}
    return {
        "device_bytes": stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes,
        "host_bytes": stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
    }


def _peak_bytes(device: Any) -> int | None:
    """The most that the allocator gave out at a time since the process began."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def _bytes_by_memory(state: Any) -> dict[str, int]:
    import jax

    found = {"state_device_bytes": 0, "state_host_bytes": 0}
    for leaf in jax.tree.leaves(state):
        host = leaf.sharding.memory_kind == "pinned_host"
        found["state_host_bytes" if host else "state_device_bytes"] += leaf.nbytes
    return found


def _peers(fragment: Fragment, tiny: bool) -> None:
    """The ordinary step at two depths, all in device memory."""
    import jax

    devices = jax.devices()[:1]
    found: dict[str, list[dict[str, Any]]] = {}
    for name, case in PEERS.items():
        found[name] = []
        for layers in TINY_PEERS if tiny else PEER_LAYERS:
            fewer = dataclasses.replace(case, layers=layers, share=0.0)
            step = build(fewer, "in memory", devices, tiny)
            state = step.init(0)
            row, state = _steps(fewer, step, state, PEER_STEPS, tiny)
            found[name].append({"layers": layers, **row})
            fragment.add(device=devices[0].device_kind, peers=found)
            print(f"peer of {name}, {layers} layers: {_said(row)}", flush=True)
            del state, step


# What follows


def verdicts(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar with what was found; `met` is None where nothing was."""
    return [*_of_copies(parts.get("copies", {})), *_of_pipelined(parts), *_of_runs(parts)]


def _verdict(bar: str, found: float | None, wanted: float, met: bool | None) -> dict[str, Any]:
    return {"bar": bar, "found": found, "wanted": wanted, "met": met}


def _of_copies(facts: dict[str, Any]) -> list[dict[str, Any]]:
    loop, peak = facts.get("loops", {}).get("both", {}), facts.get("peak")
    wanted = BARS["loop_of_device_put"]
    bar = "loop, each way, of device_put both ways at once"
    if not peak or "h2d" not in loop:
        return [_verdict(bar, None, wanted, None)]
    share = min(loop["h2d"], loop["d2h"]) / peak["both"]
    moved = loop["copy_engines"]
    return [
        _verdict(bar, share, wanted, share >= wanted and loop["right"]),
        _verdict("loop's bytes moved by copy engines", moved, True, moved),
    ]


def _of_pipelined(parts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    facts = parts.get("pipelined", {})
    if "test" in facts:
        found = facts["test"]
        bar = "pipelined transfers: losses off those without"
        yield _verdict(bar, found["largest_difference"], facts["tolerance"], found["passed"])


def _of_runs(parts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part in CASES:
        highest = 0
        yield from _of_placement(part, parts.get(part, {}))
        for run in parts.get(part, {}).get("runs", []):
            label = f"{part} {run['clipping']}"
            before, last = run["loss_before"], run["losses"][-1]
            yield _verdict(f"{label}: loss falls", last, before, run["falls"])
            # The allocator's peak is of the process, so of the largest program so far.
            highest = max(highest, run["device_bytes"] or 0)
            if run["peak_bytes"] and highest:
                off = highest / run["peak_bytes"] - 1
                wanted = BARS["aot_of_peak"]
                met = abs(off) <= wanted
                yield _verdict(f"{label}: compiled bytes off the peak", off, wanted, met)
            if run["clipping"] == "none":
                yield from _of_speed(part, run, parts)


def _of_placement(part: str, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "state_host_bytes" in facts:
        off = facts["state_host_bytes"] / facts["state_host_bytes_counted"] - 1
        yield _verdict(f"{part}: state in host memory off the count", off, 0.0, off == 0)


def _of_speed(part: str, run: dict[str, Any], parts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pair = parts.get("peers", {}).get("peers", {}).get(PEER_OF.get(part, ""), [])
    wanted = BARS["layer_of_in_memory"]
    found = layer_ratio(parts[part]["case"]["layers"], run["step_s"], pair)
    met = None if found is None else found >= wanted
    yield _verdict(f"{part}: rate of a layer, of in memory", found, wanted, met)
    if part == "adamw14b":
        tflops, wanted = run["flops_per_s"] / 1e12, BARS["model_tflops_14b"]
        yield _verdict(f"{part}: model TFLOP/s", tflops, wanted, tflops >= wanted)


def layer_ratio(layers: int, step_s: float, pair: list[dict[str, Any]]) -> float | None:
    """Seconds of a layer in memory over those of a layer of the offloaded step.

    None where the peer was not measured at both depths, or depth made no difference.
    """
    if len(pair) != 2:
        return None
    (few, few_s), (many, many_s) = [(row["layers"], row["step_s"]) for row in pair]
    layer_s = (many_s - few_s) / (many - few)
    rest_s = few_s - few * layer_s
    if layer_s <= 0 or step_s <= rest_s:
        return None
    return layers * layer_s / (step_s - rest_s)


def _report(result: dict[str, Any]) -> str:
    rows = [
        [part, run["clipping"], *_cells(run, facts)]
        for part, facts in result["parts"].items()
        for run in [*facts.get("runs", []), *_peer_runs(facts)]
    ]
    header = ["part", "clipping", "s per step", "tokens/s", "model TFLOP/s", "MFU"]
    header += ["device GiB", "peak GiB", "host GiB", "first loss", "last loss"]
    bars = [
        [v["bar"], v["found"], v["wanted"], {True: "met", False: "MISSED"}.get(v["met"], "unknown")]
        for v in result["verdicts"]
    ]
    failed = [f"{p}: {f['failed']}" for p, f in result["parts"].items() if "failed" in f]
    tables = [common.table(header, rows), common.table(["bar", "found", "wanted", ""], bars)]
    return "\n".join(["MFU = tokens/s x FLOPs/token / 989e12", *tables, *failed])


def _peer_runs(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"clipping": f"{name}, {row['layers']} layers", **row}
        for name, pair in facts.get("peers", {}).items()
        for row in pair
    ]


def _cells(run: dict[str, Any], facts: dict[str, Any]) -> list[Any]:
    sizes = [run["device_bytes"], run["peak_bytes"], run["host_bytes"]]
    shown = [None if size is None else size / GIB for size in sizes]
    speed = [run["step_s"], run["tokens_per_s"], run["flops_per_s"] / 1e12, run["mfu"]]
    return [*speed, *shown, run["losses"][0], run["losses"][-1]]


# Counting without a GPU


def _aot(arguments: argparse.Namespace) -> int:
    """Compile every case for an H200 that is not there; 1 where one does not fit."""
    sys.path.insert(0, str(common.REPOSITORY))
    import jax

    jax.config.update("jax_platforms", "cpu")
    rows = []
    for part in arguments.parts:
        cases = [(part, CASES[part], [how for how, _ in CASES[part].runs])] if part in CASES else []
        if part == "peers":
            deepest = max(PEER_LAYERS)
            cases = [
                (
                    f"peer of {name}",
                    dataclasses.replace(c, layers=deepest, share=0.0),
                    ["in memory"],
                )
                for name, c in PEERS.items()
            ]
        for name, case, clippings in cases:
            for clipping in clippings:
                rows.append([name, clipping, *_aot_gib(case, clipping, arguments.tiny)])
                print(*rows[-1], file=sys.stderr, flush=True)
    print(common.table(["case", "clipping", "device GiB", "host GiB", "host formula"], rows))
    return 1 if any(row[2] > DEVICE_GIB or row[3] > HOST_GIB for row in rows) else 0


def _aot_gib(case: Case, clipping: str, tiny: bool) -> tuple[float, float, float]:
    """GiB of device and host that the compiler counts, and of the host that the formula does."""
    import jax

    from colossax.aot import compile_program, parse_target, target_devices
    from colossax.pallas.target import target as pallas_target
    from colossax.sharding import compiler_options

    target = parse_target("h200:1x1")
    with pallas_target("gpu", compute_capability=target.gpu.compute_capability):
        step = build(case, clipping, target_devices(target), tiny)
        shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch_of(case, tiny).items()
        }
        lowered = step.jitted.lower(step.abstract, step.abstract_batch(shapes))
    found = compile_program(lowered, options=compiler_options(step.bound))
    only = dataclasses.replace(case, runs=((clipping, 1),))
    return found.device_bytes / GIB, found.host_bytes / GIB, host_bytes(only) / GIB


if __name__ == "__main__":
    sys.exit(main())
