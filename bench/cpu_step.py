"""CPU-seconds of one training step of a tiny Llama, beside peers in the same run.

The model: embed 256, 4 layers, 4 query and 2 kv heads of 64, mlp 704, vocabulary 4096, untied,
5.05 M parameters; 8 rows of 256 tokens, float32, AdamW with clipping at norm 1. CPU-seconds of
all threads are counted, because on a busy machine they move far less than wall time. Each
contestant runs in processes of its own, in turns; `outside` is everything such a process spends
before its second step: interpreter, imports, initialisation, compilation, the first step itself.

    python bench/cpu_step.py [--torch-python PATH] [--out FILE]
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import common

MODEL = {
    "vocab": 4096,
    "embed": 256,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "mlp": 704,
}
ROWS, SEQ = 8, 256
PARAMETERS = 5_048_576
OPTIMIZER = {"learning_rate": 3e-4, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
CLIP_NORM = 1.0

BAR_STEP, STRETCH_STEP, BAR_OUTSIDE = 1.05, 0.85, 14.0


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        _work(arguments)
        return
    contestants = [*WORKERS, *([TORCH] if arguments.torch_python else [])]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for _ in range(arguments.rounds):
        for name in contestants:
            results[name].append(_run(name, arguments))
    summary = {name: _summary(runs) for name, runs in results.items()}
    print(_report(summary))
    common.write_json(
        arguments.out,
        {
            "benchmark": "cpu_step",
            "hardware": common.hardware(),
            "versions": common.versions(),
            "model": MODEL,
            "batch": [ROWS, SEQ],
            "optimizer": {**OPTIMIZER, "clip_norm": CLIP_NORM},
            "bars": {"step": BAR_STEP, "stretch": STRETCH_STEP, "outside": BAR_OUTSIDE},
            "summary": summary,
            "runs": results,
        },
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="processes per contestant")
    parser.add_argument("--repeats", type=int, default=5, help="measurements per process")
    parser.add_argument("--steps", type=int, default=8, help="steps per measurement")
    parser.add_argument("--torch-python", help="an interpreter that has torch and transformers")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "cpu_step.json")
    parser.add_argument("--worker", choices=tuple(WORKERS), help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    counts = ["--repeats", str(arguments.repeats), "--steps", str(arguments.steps)]
    if name == TORCH:
        script = common.HERE / "peers" / "torch_llama.py"
        # Its threads spin while they wait: on a busy machine that alone is counted as CPU time.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"}
        words = ["cpu", *counts]
        return common.run_worker(script, words, python=arguments.torch_python, **environment)
    this = Path(__file__).resolve()
    return common.run_worker(this, ["--worker", name, *counts], JAX_PLATFORMS="cpu", XLA_FLAGS="")


def _summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    rows = [row for run in runs for row in run["rows"]]
    return {
        "step_cpu_s": common.median(rows, "cpu_s"),
        "step_wall_s": common.median(rows, "wall_s"),
        "outside_cpu_s": common.median(runs, "outside_cpu_s"),
        "first_loss": runs[0]["first_loss"],
    }


def _report(summary: dict[str, dict[str, float]]) -> str:
    ours = summary["colossax"]["step_cpu_s"]
    rows = [
        [
            name,
            s["step_cpu_s"],
            s["step_cpu_s"] / ours,
            s["step_wall_s"],
            s["outside_cpu_s"],
            s["first_loss"],
        ]
        for name, s in summary.items()
    ]
    header = ["", "CPU-s per step", "of ours", "wall s per step", "CPU-s outside", "first loss"]
    return common.table(header, rows)


def _work(arguments: argparse.Namespace) -> None:
    run, first_loss, parameters = WORKERS[arguments.worker]()
    # The first step, which compiles, is behind: its own work is counted too, so this is too much.
    outside = time.process_time()
    rows = common.repeat(run, steps=arguments.steps, repeats=arguments.repeats)
    result = {
        "rows": rows,
        "outside_cpu_s": outside,
        "first_loss": first_loss,
        "parameters": parameters,
        "versions": common.versions(),
    }
    if parameters != PARAMETERS:
        sys.exit(f"{arguments.worker}: {parameters} parameters, not {PARAMETERS}")
    print(json.dumps(result))


def make_tokens():
    import numpy as np

    rows = np.random.default_rng(0).integers(0, MODEL["vocab"], (ROWS, SEQ + 1), np.int32)
    return rows[:, :-1], rows[:, 1:]


def _colossax():
    return _boosted(chosen_plan(), _batch())


def _colossax_default():
    return _boosted(default_plan(), _batch())


def _colossax_packed():
    """With what the data loader also gives: four documents a row, their positions and weights."""
    import numpy as np

    within = np.broadcast_to(np.arange(SEQ, dtype=np.int32) % (SEQ // 4), (ROWS, SEQ))
    segments = np.broadcast_to(np.arange(SEQ, dtype=np.int32) // (SEQ // 4), (ROWS, SEQ))
    weights = (within != SEQ // 4 - 1).astype(np.float32)
    packed = {"segments": segments, "positions": within, "weights": weights}
    return _boosted(chosen_plan(), {**_batch(), **packed})


def _batch():
    import numpy as np

    tokens, targets = make_tokens()
    return {"tokens": tokens, "targets": targets, "weights": np.ones((ROWS, SEQ), np.float32)}


def _boosted(plan, batch):
    import jax
    import optax

    import colossax
    from colossax.models import LlamaConfig, maker
    from colossax.tasks import next_token_loss

    make = maker(LlamaConfig(**MODEL, max_seq=SEQ))
    optimizer = optax.adamw(**OPTIMIZER)
    state, step = colossax.boost(
        make, optimizer, next_token_loss(), plan, devices=jax.devices()[:1], clip_norm=CLIP_NORM
    )
    state, metrics = step(state, batch)
    first_loss = float(metrics["loss"])

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)

    return run, first_loss, step.spec.parameter_count()


def chosen_plan():
    """Four layers in no loop, logits in four pieces: LOG.md says what each saves."""
    import colossax
    from colossax.config import LossConfig, Segment

    layers = tuple(Segment(count=1) for _ in range(MODEL["layers"]))
    return colossax.Plan(segments=layers, loss=LossConfig(vocab_chunks=4))


def default_plan():
    """What a user gets who says nothing: one scanned stack, logits whole."""
    import colossax

    return colossax.Plan()


def _plain():
    import jax
    import optax
    from peers import plain_jax

    params = jax.jit(lambda key: plain_jax.init(plain_jax.Sizes(**MODEL), key))(jax.random.key(0))
    parameters = sum(x.size for x in jax.tree.leaves(params))
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), optax.adamw(**OPTIMIZER))
    opt_state = jax.jit(optimizer.init)(params)
    step = plain_jax.make_step(optimizer)
    tokens, targets = make_tokens()
    params, opt_state, loss = step(params, opt_state, tokens, targets)
    first_loss = float(loss)

    def run(steps: int) -> None:
        nonlocal params, opt_state
        for _ in range(steps):
            params, opt_state, loss = step(params, opt_state, tokens, targets)
        loss.block_until_ready()

    return run, first_loss, parameters


WORKERS = {
    "colossax": _colossax,
    "colossax, default plan": _colossax_default,
    "colossax, packed rows": _colossax_packed,
    "plain JAX": _plain,
}
TORCH = "torch + transformers"

if __name__ == "__main__":
    main()
