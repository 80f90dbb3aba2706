"""All that wants one GPU, step after step, each within its seconds; correctness before speed.

    python bench/on_gpu.py --out DIR [--steps STEP ...] [--limit-s 500]

tests     the kernels against dense float64, as the tests do it interpreted, several at once.
proofs    what `auto` asks for before it takes a kernel: the variants named, or all.
kernels   `gpu_kernels.py`.
float8    `gpu_float8.py`.
train     `gpu_train.py`.
offload   `gpu_offload.py`.
serve     `gpu_serve.py`.

Each step is a process of its own, or more, ended after its share of the time; what it wrote stays.
DIR has a log for each, what the scripts write, and on_gpu.json: seconds and exit codes. Arguments
of a step stand behind its name: `--steps "train --cases G2" "offload --parts copies"`.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common

LIMITS_S = {
    "tests": 150.0,
    "proofs": 100.0,
    "kernels": 200.0,
    "float8": 90.0,
    "train": 240.0,
    "offload": 240.0,
    "serve": 300.0,
}
AT_ONCE = 8
"""Processes of the tests; they share the GPU's memory."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", nargs="+", default=list(LIMITS_S), help=", ".join(LIMITS_S))
    parser.add_argument("--limit-s", type=float, default=500.0, help="of all together")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if arguments.worker:
        return _prove(out, *arguments.worker)
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.limit_s
    steps: dict[str, Any] = {}
    for asked in arguments.steps:
        name, *more = shlex.split(asked)
        if name not in LIMITS_S:
            parser.error(f"unknown step '{name}'; choose from {', '.join(LIMITS_S)}")
        limit_s = min(LIMITS_S[name], deadline - time.monotonic())
        if limit_s > 0:
            steps[asked] = _run(name, more, out, limit_s)
        else:
            steps[asked] = {"exit_code": 124, "wall_s": 0.0}
        print(f"{asked}: {steps[asked]}", flush=True)
        common.write_json(out / "on_gpu.json", {"hardware": common.hardware(), "steps": steps})
    return 1 if any(one["exit_code"] for one in steps.values()) else 0


def _run(name: str, more: list[str], out: Path, limit_s: float) -> dict[str, Any]:
    here = str(common.HERE)
    words = {
        "tests": ["-m", "pytest", "-q", "-m", "gpu", f"-n{AT_ONCE}", "-Wignore", "tests/pallas"],
        "proofs": [__file__, "--out", str(out), "--worker", f"{limit_s - 5:.0f}"],
        "kernels": [f"{here}/gpu_kernels.py", "--out", str(out / "gpu_kernels.json")],
        "float8": [f"{here}/gpu_float8.py", "--out", str(out / "gpu_float8.json")],
        "train": [f"{here}/gpu_train.py", "--out", str(out / "gpu_train.json")],
        "offload": [f"{here}/gpu_offload.py", "--out", str(out / "gpu_offload")],
        "serve": [f"{here}/gpu_serve.py", "--resume", "--out", str(out / "gpu_serve.json")],
    }[name]
    if name == "tests":
        words += ["--timeout=90", "--timeout-method=thread", f"--junitxml={out / 'tests.xml'}"]
    paths = [str(common.REPOSITORY), here, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if name in ("tests", "proofs"):
        environment |= {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    began = time.monotonic()
    with (out / f"{name}.log").open("a") as log:
        child = subprocess.Popen(
            [sys.executable, *words, *more],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=common.REPOSITORY,
            env=environment,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = 124
            _end(child)
    return {"exit_code": code, "wall_s": round(time.monotonic() - began, 1)}


def _end(child: subprocess.Popen) -> None:
    """Interrupted, it ends what it has started; else it is killed."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10.0)
            return


def _prove(out: Path, limit_s: str, *wanted: str) -> int:
    """Verdicts on the variants named, or on all; written one by one."""
    import jax

    from colossax.pallas import (
        attention,
        grouped_matmul,
        int4_matmul,
        paged_attention,
        sparse_matmul,
    )
    from colossax.pallas.proof import PROVER

    rooms = (attention, grouped_matmul, paged_attention, int4_matmul, sparse_matmul)
    every = [one for room in rooms for one in room.variants()]
    some = [one for one in every if not wanted or str(one) in wanted]
    found: dict[str, Any] = {}
    kind = jax.devices()[0].device_kind
    deadline = time.monotonic() + float(limit_s)
    for one in some:
        began = time.monotonic()
        for _, verdict in PROVER.prove_all([one], kind, total_s=deadline - began):
            wall_s = round(time.monotonic() - began, 1)
            found[str(one)] = {"wall_s": wall_s, "text": verdict.text, **verdict.to_json()}
            print(f"{one}: {wall_s} s: {verdict.text}", flush=True)
        facts = {"device": kind, "versions": common.versions(), "verdicts": found}
        (out / "gpu_proofs.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if len(found) == len(some) else 1


if __name__ == "__main__":
    sys.exit(main())
