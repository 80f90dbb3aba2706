"""Training speed on one GPU, against a matmul limit and a peer measured in the same run.

G1: Llama-2-7B whole (32 layers, 4096 x 11008, vocabulary 32000), rows of 4096 tokens: tokens per
second of the best batch and remat policy among `--settings`.
G2: 8 layers of Llama-3-8B's width, 2 rows of 8192 tokens: model FLOP/s over the bf16 matmul limit,
and over what `transformers` with torch.compile reaches.

Parameters, AdamW and gradients are float32, matmuls bf16, tokens random. Model FLOPs per token are
    6 (weights of all matmuls, head included) + 6 layers heads head_dim (seq + 1)
forward and backward, causal scores counted by half, recomputation and the embedding look-up never.
The matmul limit is the best of several square bf16 products of random numbers, before and after.

Each measurement is a process of its own, so that the GPU's memory is whole for each; ours and the
peer's take turns. The result is written after every process, so a run cut short keeps what it had.
Imports neither grain nor tyro. `--smoke` runs every path in seconds at toy sizes, on a CPU too.

    python bench/gpu_train.py [--cases G1 G2] [--settings full:4 qkv+attention:2] [--out FILE]
"""

import argparse
import importlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import device_trace

CASES: dict[str, dict[str, int]] = {
    "G1": {
        "vocab": 32_000,
        "embed": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 32,
        "head_dim": 128,
        "mlp": 11_008,
        "max_seq": 4096,
    },
    "G2": {
        "vocab": 128_256,
        "embed": 4096,
        "layers": 8,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "mlp": 14_336,
        "max_seq": 8192,
    },
}
SETTINGS = {
    "G1": ["none:1", "qkv+attention+mlp:2"],
    "G2": ["none:2", "qkv+attention+mlp:2"],
}
SMOKE = {
    "embed": 64,
    "layers": 2,
    "heads": 4,
    "head_dim": 16,
    "mlp": 96,
    "vocab": 512,
    "max_seq": 64,
}
OPTIMIZER = {"learning_rate": 3e-4, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
CLIP_NORM = 1.0
VOCAB_CHUNKS = 8
WARM_UP = 3
TRACED = 40
"""Kernels that a trace names."""

BARS = {
    "G1_tokens_per_s": 12_000,
    "G2_of_matmul_limit": 0.68,
    "G2_of_torch": 1.15,
}
PUBLIC = "published for 8 GPUs, communication included: 8,771 tokens/s per H200, 11,361 per H100"


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        worker = {"train": _train, "limit": _limit}[arguments.worker]
        print(json.dumps({**worker(arguments), "versions": common.versions()}))
        return
    _require_packages()
    result: dict[str, Any] = {
        "benchmark": "gpu_train",
        "hardware": common.hardware(),
        "smoke": arguments.smoke,
        "bars": BARS,
        "public": PUBLIC,
        "flops_per_token": "6 weights + 6 layers heads head_dim (seq + 1)",
        "limits": [],
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as cache:
        for arguments_of, name in _programme(arguments):
            _measure(result, name, arguments_of, cache, arguments)
    print(_report(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument(
        "--settings",
        nargs="+",
        help="REMAT:ROWS[xPASSES][:MATMUL], each measured; gradients of PASSES are added up",
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of ours and the peer in G2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter of the peer")
    parser.add_argument("--trace", action="store_true", help="also where a step's time goes")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, any device")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "gpu_train.json")
    parser.add_argument("--worker", choices=("train", "limit"), help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=tuple(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    return parser.parse_args()


def _require_packages() -> None:
    """End with one sentence where a package is missing or does not fit this JAX."""
    sys.path.insert(0, str(common.REPOSITORY))
    for name in ("jax", "optax", "jaxtyping", "flax.nnx", "colossax"):
        try:
            importlib.import_module(name)
        except (ImportError, AttributeError, TypeError) as problem:
            sys.exit(
                f"gpu_train: cannot import {name} here ({problem}); put wheels that fit this JAX"
                f" into a folder (flax 0.12.12 fits JAX 0.11 and later) and name it in PYTHONPATH"
            )


def _programme(arguments: argparse.Namespace):
    """Worker arguments and labels in the order they run."""
    yield ["--worker", "limit"], "limit"
    for case in arguments.cases:
        settings = arguments.settings or SETTINGS[case]
        rounds = arguments.rounds if case == "G2" else 1
        for _ in range(rounds):
            for setting in settings:
                yield ["--worker", "train", "--case", case, "--setting", setting], "colossax"
            if case == "G2" and not arguments.no_torch:
                yield ["gpu", "--case", case], "torch"
    yield ["--worker", "limit"], "limit"


def _measure(
    result: dict[str, Any], name: str, words: list[str], cache: str, arguments: argparse.Namespace
) -> None:
    """Run one worker, add what it says (or why it failed) to the result and write that."""
    script, python = Path(__file__).resolve(), sys.executable
    if name == "torch":
        script, python = common.HERE / "peers" / "torch_llama.py", arguments.torch_python
    words = [*words, "--steps", str(arguments.steps), *(["--smoke"] if arguments.smoke else [])]
    words += ["--trace"] if arguments.trace and name == "colossax" else []
    environment = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5",
    }
    started = time.perf_counter()
    try:
        row = common.run_worker(script, words, python=python, **environment)
    except RuntimeError as problem:
        row = {"failed": last_words(str(problem))}
    row = {"name": name, "words": words, "process_s": time.perf_counter() - started, **row}
    result["limits" if name == "limit" else "runs"].append(row)
    common.write_json(arguments.out, result)
    shown = row.get("failed") or row.get("tokens_per_s") or row.get("flops_per_s")
    print(f"{' '.join(words)}: {shown}", file=sys.stderr, flush=True)


def last_words(text: str) -> str:
    """The line that says why, of a traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "RESOURCE_EXHAUSTED" in line or "Error" in line]
    return (telling or lines)[-1].strip()[:400]


def sizes_of(case: str, smoke: bool) -> dict[str, int]:
    """Sizes of a case, or toy ones of the same form."""
    sizes = CASES[case]
    if not smoke:
        return sizes
    group = sizes["heads"] // sizes["kv_heads"]
    return {**SMOKE, "kv_heads": SMOKE["heads"] // group}


def flops_per_token(sizes: dict[str, int]) -> int:
    """Model FLOPs per token, forward and backward; the formula of the module docstring."""
    attention = sizes["embed"] * sizes["head_dim"] * 2 * (sizes["heads"] + sizes["kv_heads"])
    layer = attention + 3 * sizes["embed"] * sizes["mlp"]
    weights = sizes["layers"] * layer + sizes["embed"] * sizes["vocab"]
    scores = sizes["layers"] * sizes["heads"] * sizes["head_dim"] * (sizes["max_seq"] + 1)
    return 6 * weights + 6 * scores


def _limit(arguments: argparse.Namespace) -> dict[str, Any]:
    """FLOP/s of square bf16 products of random numbers: the best size's median."""
    import jax
    import jax.numpy as jnp

    sizes = (256,) if arguments.smoke else (8192, 16_384)
    product = jax.jit(jnp.matmul)
    rates = {}
    for size in sizes:
        keys = jax.random.split(jax.random.key(size))
        a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
        product(a, b).block_until_ready()
        seconds = []
        for _ in range(10):
            clock = common.Clock()
            for _ in range(4):
                last = product(a, b)
            last.block_until_ready()
            seconds.append(clock.read()["wall_s"] / 4)
        rates[str(size)] = 2 * size**3 / statistics.median(seconds)
    return {"flops_per_s": max(rates.values()), "by_size": rates, "device": str(jax.devices()[0])}


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step of ours under one setting."""
    import jax
    import numpy as np
    import optax

    import colossax
    from colossax.config import BatchConfig, LossConfig, Precision, Segment
    from colossax.models import LlamaConfig, maker
    from colossax.tasks import next_token_loss

    sizes = sizes_of(arguments.case, arguments.smoke)
    remat, at_once, *matmul = arguments.setting.split(":")
    rows, _, passes = at_once.partition("x")
    rows, passes = int(rows) * int(passes or 1), int(passes or 1)
    plan = colossax.Plan(
        segments=(Segment(remat=remat),),
        precision=Precision(compute="bfloat16", **({"matmul": matmul[0]} if matmul else {})),
        batch=BatchConfig(accumulation=passes),
        loss=LossConfig(vocab_chunks=1 if arguments.smoke else VOCAB_CHUNKS),
    )
    told = _Told()
    random = np.random.default_rng(0)
    seq = sizes["max_seq"]
    tokens = random.integers(0, sizes["vocab"], (rows, seq + 1), np.int32)
    weights = np.ones((rows, seq), np.float32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    started = time.perf_counter()
    state, step = colossax.boost(
        maker(LlamaConfig(**sizes)),
        optax.adamw(**OPTIMIZER),
        next_token_loss(),
        plan,
        devices=jax.devices()[:1],
        clip_norm=CLIP_NORM,
    )
    batch = jax.device_put(batch)
    losses, seconds = [], []
    for i in range(WARM_UP + arguments.steps):
        clock = common.Clock()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(clock.read()["wall_s"])
        if i == 0:
            first_s = time.perf_counter() - started
    traced = {"trace": _traced(step, state, batch)} if arguments.trace else {}
    return {
        **traced,
        **rates(sizes, rows, seconds[WARM_UP:]),
        "setting": arguments.setting,
        "first_step_s": first_s,
        "kernels": told.lines,
        "losses": [losses[0], losses[-1]],
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def _traced(step: Any, state: Any, batch: Any) -> dict[str, Any]:
    """Seconds by kernel of one step more."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(state, batch))
        return device_trace.summary(Path(folder), longest=TRACED)


class _Told(logging.Handler):
    """Which implementations were taken from here on, and why not others."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        log = logging.getLogger("colossax.pallas")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def rates(sizes: dict[str, int], rows: int, seconds: list[float]) -> dict[str, Any]:
    """What follows from the median step."""
    median = statistics.median(seconds)
    tokens_per_s = rows * sizes["max_seq"] / median
    return {
        "step_s": median,
        "steps_s": seconds,
        "rows": rows,
        "tokens_per_s": tokens_per_s,
        "flops_per_s": tokens_per_s * flops_per_token(sizes),
    }


def _report(result: dict[str, Any]) -> str:
    limit = max((row.get("flops_per_s", 0.0) for row in result["limits"]), default=0.0)
    rows = []
    for run in result["runs"]:
        case = run["words"][run["words"].index("--case") + 1]
        if "failed" in run:
            rows.append([case, run["name"], " ".join(run["words"][2:6]), None, None, run["failed"]])
            continue
        of_limit = run["flops_per_s"] / limit if limit else None
        setting = run.get("setting", "torch.compile")
        rows.append([case, run["name"], setting, run["tokens_per_s"], of_limit, run["step_s"]])
    header = ["case", "", "setting", "tokens/s", "of matmul limit", "s per step"]
    return f"bf16 matmul limit {limit / 1e12:.1f} TFLOP/s\n{common.table(header, rows)}"


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
