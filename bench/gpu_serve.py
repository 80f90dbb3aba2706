"""Serving speed on one GPU, beside a copy measured in the same run: Llama-3-8B's shape in bf16.

single    one stream, 512 tokens read, 256 said: tokens/s over what reading the weights once a token
          allows at the copy's rate.
decode    64 seats at 2,048 tokens each: bytes of weights and of visible cache a step over its time,
          over the copy's rate.
mixed     256 requests with lengths spread as those of conversations (ShareGPT), all at once:
          tokens said a second.
fixed     the same with `deterministic=True`: what one size of step costs.

Weights are random: nothing of these depends on them. Programs are compiled before. The copy's rate
counts what is read and what is written, its best of several. Each case is a process of its own, and
the result is written after it, so a run cut short keeps what it had; `--resume` goes on with
what is missing. `--smoke` runs every path in seconds at toy sizes, on a CPU too.

    python bench/gpu_serve.py [--cases single decode mixed fixed] [--resume] [--out FILE]
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import common
import random_llama

MODEL = {
    "vocab": 128_256,
    "embed": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "mlp": 14_336,
    "max_seq": 8192,
}
SMOKE = {
    "vocab": 512,
    "embed": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "mlp": 96,
    "max_seq": 256,
}
BARS = {
    "single_of_weights_limit": 0.85,
    "decode_of_copy": 0.80,
    "mixed_tokens_per_s": 10_000,
    "fixed_cost": 0.10,
}
CASES = ("single", "decode", "mixed", "fixed")


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        print(json.dumps(_measure(arguments.worker, smoke=arguments.smoke)))
        return
    result: dict[str, Any] = {}
    if arguments.resume and arguments.out.exists():
        result = json.loads(arguments.out.read_text())
    result |= {"benchmark": "gpu_serve", "hardware": common.hardware(), "bars": BARS}
    result["smoke"] = arguments.smoke
    cases = result.setdefault("cases", {})
    for name in arguments.cases:
        if name in cases and "error" not in cases[name]:
            continue
        words = ["--worker", name, *(["--smoke"] if arguments.smoke else [])]
        try:
            cases[name] = common.run_worker(Path(__file__).resolve(), words)
        except RuntimeError as problem:
            cases[name] = {"error": str(problem)}
        common.write_json(arguments.out, result)
    print(_report(cases))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--resume", action="store_true", help="keep what FILE has")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, any device")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "gpu_serve.json")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args()


def _report(cases: dict[str, Any]) -> str:
    rows = []
    for name, found in cases.items():
        shown = found.get("error", "")[-200:] or ", ".join(
            f"{key} {value:,.4g}" for key, value in found.items() if isinstance(value, float)
        )
        rows.append([name, shown])
    if {"mixed", "fixed"} <= cases.keys() and not any("error" in one for one in cases.values()):
        speeds = [cases[name]["tokens_per_s"] for name in ("fixed", "mixed")]
        rows.append(["fixed costs", f"{1 - speeds[0] / speeds[1]:.3f}, bar {BARS['fixed_cost']}"])
    return common.table(["case", "measured"], rows)


def _measure(case: str, *, smoke: bool) -> dict[str, Any]:
    model = SMOKE if smoke else MODEL
    measure = {"single": _single, "decode": _decode, "mixed": _mixed, "fixed": _mixed}[case]
    copied = _copy_rate(2**22 if smoke else 2**30)
    found = measure(model, copied, fixed=case == "fixed")
    return {**found, "copy_bytes_per_s": copied, "versions": common.versions()}


def _copy_rate(count: int) -> float:
    """Bytes read and written a second by the best of several copies."""
    import jax
    import jax.numpy as jnp

    x, add = jnp.zeros(count, jnp.bfloat16), jax.jit(lambda x: x + 1)
    add(x).block_until_ready()
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(10):
            x = add(x)
        x.block_until_ready()
        best = min(best, (time.perf_counter() - began) / 10)
    return 4 * count / best


def _engine(model: dict[str, int], **options: Any) -> tuple[Any, int]:
    """With random weights, compiled, and the bytes of those that a step reads."""
    sys.path.insert(0, str(common.REPOSITORY))
    import jax

    from colossax.config import Precision

    bf16 = Precision(params="bfloat16", compute="bfloat16", cache="bfloat16")
    engine, params = random_llama.engine(model, bf16, **options)
    table = 2 * model["vocab"] * model["embed"]  # of it a step reads single rows
    return engine, sum(x.nbytes for x in jax.tree.leaves(params)) - table


def _request(noise: Any, model: dict[str, int], prompt: int, said: int) -> Any:
    from colossax.scheduling import EngineRequest

    tokens = tuple(noise.integers(0, model["vocab"], prompt).tolist())
    return EngineRequest(prompt=tokens, max_tokens=said)


def _single(model: dict[str, int], copied: float, *, fixed: bool) -> dict[str, Any]:
    import numpy as np

    longest = model["max_seq"] // 4
    engine, weights = _engine(model, seats=1, slots=longest, mixed_tokens=longest // 4)
    noise = np.random.default_rng(0)
    engine.add(_request(noise, model, longest // 4, longest // 8))
    times = []
    while engine.busy:
        times += [time.perf_counter() for _ in engine.step()]
    rate = (len(times) - 1) / (times[-1] - times[0])
    limit = copied / weights
    return {"tokens_per_s": rate, "limit_tokens_per_s": limit, "of_limit": rate / limit}


def _decode(model: dict[str, int], copied: float, *, fixed: bool) -> dict[str, Any]:
    import numpy as np

    seats, longest = 64, model["max_seq"] // 4
    steps = longest // 8
    slots = longest + 2 * steps
    engine, weights = _engine(model, seats=seats, slots=slots, mixed_tokens=2048)
    noise = np.random.default_rng(0)
    for _ in range(seats):
        engine.add(_request(noise, model, longest, 2 * steps))
    began, counted = None, 0
    while engine.busy and counted < steps:
        told = engine.step()
        if len(told) == seats:
            began, counted = began or time.perf_counter(), counted + 1
    assert began is not None
    each = (time.perf_counter() - began) / (counted - 1)
    head = model["embed"] // model["heads"]
    token = 2 * 2 * model["layers"] * model["kv_heads"] * head
    read = weights + seats * (longest + steps // 2) * token
    return {"step_s": each, "bytes": float(read), "of_copy": read / each / copied}


def _mixed(model: dict[str, int], copied: float, *, fixed: bool) -> dict[str, Any]:
    import numpy as np

    noise = np.random.default_rng(0)
    slots = model["max_seq"] // 2
    engine, _ = _engine(model, seats=128, slots=slots, mixed_tokens=2048, deterministic=fixed)
    count = 256
    most = slots // 2 - 1
    prompts, said = (
        np.clip(noise.lognormal(np.log(middle), 1.0, count), 4, most).astype(int)
        for middle in (slots // 20, slots // 20)
    )
    for prompt, more in zip(prompts, said, strict=True):
        engine.add(_request(noise, model, int(prompt), int(more)))
    began, told = time.perf_counter(), 0
    while engine.busy:
        told += sum(one.token is not None for one in engine.step())
    wall = time.perf_counter() - began
    steps = {f"{kind}_steps": float(n) for kind, n in engine.stats.steps.items()}
    return {"tokens_per_s": told / wall, "read": float(sum(prompts)), "wall_s": wall, **steps}


if __name__ == "__main__":
    main()
