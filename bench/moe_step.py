"""CPU-seconds of a step with experts over those of a dense step of as many active parameters.

`moe_tiny` and the dense model of `moe_main_job.py`, each in a process of its own, in turns; all
threads are counted, because on a busy machine CPU-seconds move far less than wall time.

    python bench/moe_step.py [--rounds 3] [--out FILE]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import common
import moe_main_job

BAR = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes of each")
    parser.add_argument("--steps", type=int, default=4, help="steps per measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements per process")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "moe_step.json")
    parser.add_argument("--worker", choices=moe_main_job.MODELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments)
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in moe_main_job.MODELS}
    for _ in range(arguments.rounds):
        for name, found in runs.items():
            found.append(_run(name, arguments))
    summary = {
        name: {
            "cpu_s": common.median([row for run in found for row in run["rows"]], "cpu_s"),
            "parameters": found[0]["parameters"],
            "flops_per_token": found[0]["flops_per_token"],
        }
        for name, found in runs.items()
    }
    ratio = summary["experts"]["cpu_s"] / summary["dense"]["cpu_s"]
    header = ["", "CPU-s per step", "parameters", "FLOPs a token"]
    rows = [
        [name, *(s[key] for key in ("cpu_s", "parameters", "flops_per_token"))]
        for name, s in summary.items()
    ]
    print(common.table(header, rows))
    print(f"ratio {ratio:.3f}, bar {BAR}: {'met' if ratio <= BAR else 'NOT MET'}")
    common.write_json(
        arguments.out,
        {
            "benchmark": "moe_step",
            "hardware": common.hardware(),
            "versions": common.versions(),
            "bars": {"ratio": BAR},
            "ratio": ratio,
            "summary": summary,
            "runs": runs,
        },
    )


def _run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    counts = ["--steps", str(arguments.steps), "--repeats", str(arguments.repeats)]
    words = ["--worker", name, *counts]
    return common.run_worker(Path(__file__).resolve(), words, JAX_PLATFORMS="cpu", XLA_FLAGS="")


def _work(arguments: argparse.Namespace) -> None:
    import jax
    import numpy as np

    from colossax.planner import boost
    from colossax.tasks import task_of

    config = moe_main_job.made(arguments.worker)
    task = task_of(config)
    state, step = boost(
        task.make_model, task.optimizer, task.loss, config.plan, devices=jax.devices()[:1]
    )
    rng = np.random.default_rng(0)
    shape = (config.data.global_batch, config.data.seq_len)
    tokens, targets = rng.integers(0, config.model.vocab, (2, *shape), dtype=np.int32)
    batch = {"tokens": tokens, "targets": targets, "weights": np.ones(shape, np.float32)}
    state, metrics = jax.block_until_ready(step(state, batch))

    def run(steps: int) -> None:
        nonlocal state, metrics
        for _ in range(steps):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    rows = common.repeat(run, steps=arguments.steps, repeats=arguments.repeats)
    facts = {"flops_per_token": moe_main_job.flops(config), "loss": metrics["loss"].item()}
    count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    print(json.dumps({"rows": rows, "parameters": count, **facts}))


if __name__ == "__main__":
    main()
