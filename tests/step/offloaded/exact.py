"""Steps with layers updated during backward and ordinary ones, compared bit for bit.

`python -m tests.step.offloaded.exact FILE NAME ...` writes what was found of the named cases as
JSON. A process of its own, because the compiler must neither contract multiplications and
additions nor leave out a rounding to bfloat16: it does so within a fusion, and where those begin
and end is the one thing in which the programs may differ. Nor may it leave sums to a library when
they are large: a stack of matrices is, one of them is not, and the library adds in another order.
"""

import dataclasses
import fcntl
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from colossax.config import BatchConfig, OffloadConfig, Precision, Segment
from colossax.optim import adamw, lamb, sgd
from tests.step.offloaded import streamed

ROOT = Path(__file__).resolve().parents[3]

OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda: adamw(1e-2),
    "bf16": lambda: adamw(1e-2, moment_dtype="bfloat16", second_moment_dtype="bfloat16"),
    "sgd": lambda: sgd(0.1),
    "momentum": lambda: sgd(0.1, momentum=0.9),
    "lamb": lambda: lamb(1e-2),
    # So slow that a step's last bits hardly ever decide how a parameter is rounded to bfloat16.
    "slow": lambda: sgd(1e-2),
}
PLACEMENTS: dict[str, dict] = {
    "none": {},
    "host": streamed.HOST,
    "shares": streamed.SHARED,
    "optimizer": {"optimizer": 1.0},
    "fused": {"fused": True},
    "cpu": {**streamed.HOST, "cpu_update": 1.0},
    "cpu_half": {**streamed.HOST, "cpu_update": 0.5},
    "cpu_some": {"parameters": 0.75, "optimizer": 1.0, "cpu_update": 0.5},
}
SEGMENTS = {"whole": (Segment(remat="full"),)}
SEGMENTS["single"] = (Segment(count=1, remat="full"), Segment(remat="full"))
SEGMENTS["halves"] = (Segment(count=2, remat="full"), Segment(remat="full"))


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison."""

    optimizer: str
    placement: str
    devices: int = 1
    pieces: int = 1
    segments: str = "whole"
    compute: str = "float32"
    clip_norm: float | None = None
    against: str = "none"

    @property
    def name(self) -> str:
        """Every field."""
        return "-".join(str(value) for value in dataclasses.astuple(self))


CASES = (
    Case("adamw", "host"),
    Case("adamw", "shares", segments="single"),
    Case("adamw", "shares", pieces=2),
    Case("adamw", "fused"),
    Case("adamw", "host", devices=8),
    Case("bf16", "host"),
    Case("lamb", "host"),
    Case("lamb", "host", devices=8, pieces=2),
    Case("momentum", "shares"),
    Case("momentum", "host", devices=8, pieces=2),
    Case("bf16", "shares", devices=8, pieces=2),
    Case("sgd", "host", devices=8),
    Case("sgd", "optimizer"),
    Case("adamw", "host", compute="bfloat16"),
    Case("slow", "host", compute="bfloat16", clip_norm=0.5),
)


CPU = (
    Case("adamw", "cpu_some", devices=8, segments="single"),
    Case("adamw", "cpu_half"),
    Case("adamw", "cpu", pieces=2),
    Case("bf16", "cpu_some", segments="single"),
    Case("momentum", "cpu_half", compute="bfloat16"),
    Case("adamw", "cpu_half", segments="halves", clip_norm=0.5, against="host"),
    Case("adamw", "cpu", segments="halves", clip_norm=0.5, against="host", pieces=2),
)
"""Part of the update by the CPU. Clipped, against the same segments without it: the norm adds up
segments apart."""


def compare(case: Case) -> dict:
    """Losses of both, the largest relative difference of each array, and those that never moved."""
    start, want, wanted = _run(dataclasses.replace(case, placement=case.against))
    other, got, losses = _run(case)
    assert start.keys() == want.keys() == other.keys() == got.keys()
    return {
        "losses": losses,
        "wanted": wanted,
        "off": {name: _off(got[name], want[name]) for name in want},
        "start": {name: _off(other[name], start[name]) for name in want},
        "still": [name for name in want if _off(want[name], start[name]) == 0],
    }


def _off(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30))


@functools.lru_cache(maxsize=4)
def _run(case: Case):
    """(arrays at the start, at the end, losses)."""
    plan = streamed.FULL.replace(
        segments=SEGMENTS[case.segments],
        batch=BatchConfig(accumulation=case.pieces),
        precision=Precision(compute=case.compute),
        offload=OffloadConfig(**PLACEMENTS[case.placement]),
    )
    state, step = streamed.started(
        plan,
        OPTIMIZERS[case.optimizer](),
        devices=jax.devices()[: case.devices],
        clip_norm=case.clip_norm,
    )
    start = _arrays(state, step)
    state, found = streamed.stepped(state, step, rows=8 * case.pieces)
    return start, _arrays(state, step), [one["loss"] for one in found]


def _arrays(state, step):
    return streamed.by_path(step, {kind: state[kind] for kind in ("params", "opt_state")})


def compared(request: pytest.FixtureRequest, factory: pytest.TempPathFactory, name: str) -> dict:
    """What a process of its own found of the cases that the tests of this module will ask for.

    One for all workers of a test run, which wait for it.
    """
    of_module = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in of_module if hasattr(item, "callspec")]
    cases = [one["case"] for one in params if "case" in one]
    folder = factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    file = folder / f"exact-{name}.json"
    with (folder / f"exact-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _compare_apart(cases, file)
    return json.loads(file.read_text())


def _compare_apart(cases: list[Case], file: Path) -> None:
    exactly = (
        "--xla_cpu_max_isa=AVX",  # which has no FMA instruction
        "--xla_allow_excess_precision=false",
        "--xla_cpu_experimental_ynn_fusion_type=",
    )
    flags = " ".join((os.environ.get("XLA_FLAGS", ""), *exactly))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.step.offloaded.exact",
            str(file),
            *(case.name for case in cases),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    known = {case.name: case for case in (*CASES, *CPU)}
    results = {name: compare(known[name]) for name in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(results))
