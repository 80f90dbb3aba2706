"""Losses of short runs of every kind, to the bit: for changes that may not change one.

    python3 ci/same_losses.py before.json                     measure
    python3 ci/same_losses.py after.json --against before.json   measure and compare

Runs the command line of the tree that this file lies in, with the Python that runs it. Exits 1
where a loss or a gradient norm differs by one bit, or a run fails. Some minutes on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TINY = ("llama_tiny", "--steps", "4", "--validate-every", "0", "--checkpoint-every", "0")
HOST = "parameters=1,optimizer=1,activations=1"

RUNS: dict[str, tuple[str, ...]] = {
    "main": ("llama_stdlib", "--steps", "3", "--devices", "1"),
    "zero3": (*TINY, "--devices", "8", "--plan.preset", "zero3"),
    "megatron_sp": (*TINY, "--devices", "8", "--plan.mesh", "fsdp=4,tensor=2")
    + ("--plan.preset", "zero3+megatron_sp"),
    "reduce_once": (*TINY, "--devices", "4", "--plan.preset", "zero1")
    + (
        "--plan.mesh",
        "data=4",
        "--plan.batch.accumulation",
        "2",
        "--plan.batch.reduce_once",
        "true",
    ),
    "usp": (*TINY, "--devices", "8", "--plan.mesh", "fsdp=2,ring=2,ulysses=2"),
    "2.5d": (*TINY, "--devices", "8", "--plan.mesh", "fsdp=2,depth=2,col=2")
    + ("--plan.tensor_layout", "2.5d"),
    "offload": (*TINY, "--devices", "2", "--plan.offload", HOST),
    "disk": (*TINY, "--devices", "1", "--plan.offload", "parameters=1,optimizer=1,disk=1"),
}


def losses(words: tuple[str, ...]) -> list[list[str]]:
    """Loss and gradient norm of each step as hexadecimal floats."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "colossax",
            "train",
            *words,
            "--json",
            "--out",
            f"{folder}/run",
        ]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        [float(x["loss"]).hex(), float(x["grad_norm"]).hex()] for x in lines if "grad_norm" in x
    ]


def main() -> int:
    """Measure, write, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=RUNS)
    options = parser.parse_args()
    measured = {}
    for name in options.only:
        measured[name] = losses(RUNS[name])
        print(f"{name}: {[float.fromhex(loss) for loss, _ in measured[name]]}", flush=True)
    options.out.write_text(json.dumps(measured, indent=1) + "\n")
    if options.against is None:
        return 0
    before = json.loads(options.against.read_text())
    changed = [name for name in measured if measured[name] != before.get(name)]
    print(f"not the same: {', '.join(changed)}" if changed else "the same, to the bit")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
