"""Stages on sixteen and thirty-two host devices, and in two processes, equal one device."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import free_port

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import jax
jax.config.update("jax_default_matmul_precision", "highest")
from colossax.config import preset
from tests.step.stages import test_stages as stages
plan = preset({preset!r}, mesh={mesh!r}, segments=stages.FULL, **stages.piped({microbatches}))
assert len(jax.devices()) == {devices}
stages.assert_equals_one_device("packed", plan.replace(tensor_layout={layout!r}), rows={rows})
print("equal")
"""
TOGETHER = {"fsdp": 2, "ring": 2, "tensor": 2}
LAYERS = {"depth": 2, "row": 2, "col": 2}


def started(*words, devices):
    """A Python of its own. Collectives that wait side by side hold a thread each, hence `NPROC`."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": str(max(32, 4 * devices))}
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
    )


def assert_equal(*processes):
    try:
        for process in processes:
            told, errors = process.communicate(timeout=280)
            assert (process.returncode, told.splitlines()[-1:]) == (0, ["equal"]), errors[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("preset", "mesh", "layout", "microbatches"),
    [
        ("zero3+megatron_sp", {"stage": 2, **TOGETHER}, "1d", 3),
        ("zero3+megatron_sp", {"stage": 4, **TOGETHER}, "1d", 4),
        ("zero2+megatron", {"stage": 2, "ulysses": 2, **TOGETHER}, "1d", 2),
        ("zero3", {"stage": 2, **LAYERS}, "2.5d", 3),
        ("zero3", {"stage": 2, "ring": 2, **LAYERS}, "2.5d", 2),
    ],
)
def test_stages_and_all_kinds_of_axes_at_once(preset, mesh, layout, microbatches):
    devices = math.prod(mesh.values())
    how = {"preset": preset, "mesh": mesh, "layout": layout, "microbatches": microbatches}
    assert_equal(started("-c", PROGRAM.format(**how, devices=devices, rows=16), devices=devices))


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["across", "inside"])
def test_stages_of_two_processes(how):
    address, program = f"127.0.0.1:{free_port()}", "tests.step.stages.across"
    words = ("-m", program, address)
    assert_equal(*(started(*words, str(number), how, devices=4) for number in range(2)))
