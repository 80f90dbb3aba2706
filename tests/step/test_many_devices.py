"""Sixteen and thirty-two host devices equal one: all kinds of axes at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import jax
jax.config.update("jax_default_matmul_precision", "highest")
from colossax.config import preset
from tests.step.test_parallel_oracle import assert_equals_one_device
plan = preset({preset!r}, mesh={mesh!r})
assert len(jax.devices()) == {devices}
assert_equals_one_device("packed", plan.replace(tensor_layout={layout!r}), jax.devices())
print("equal")
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("preset", "mesh", "layout"),
    [
        ("zero3+megatron_sp", {"fsdp": 2, "ring": 2, "ulysses": 2, "tensor": 2}, "1d"),
        (
            "zero3+megatron_sp",
            {"data": 2, "fsdp": 2, "ring": 2, "ulysses": 2, "tensor": 2},
            "1d",
        ),
        (
            "zero3",
            {"fsdp": 2, "ring": 2, "depth": 2, "row": 2, "col": 2},
            "2.5d",
        ),
    ],
)
def test_all_kinds_of_axes_at_once(preset, mesh, layout):
    devices = 1
    for size in mesh.values():
        devices *= size
    program = PROGRAM.format(preset=preset, mesh=mesh, layout=layout, devices=devices)
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "128"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        timeout=280,
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr[-3000:]
