"""Sixteen devices: rings of four in both directions, whose loops run more than once."""

import os
import subprocess
import sys

PROGRAM = """
import jax
from colossax.config import preset
from colossax.sharding import use
from tests.oracle import assert_trees_close
from tests.sharding.matmul.layouts import MAPS, flat, sequence_parallel
from tests.sharding.matmul.test_island import by_plan, outputs_and_gradients, plainly

jax.config.update("jax_default_matmul_precision", "highest")
plans = {
    "cannon": flat("2d", "cannon", row=4, col=4),
    "3d": flat("3d", depth=2, row=2, col=4),
    "overlap": sequence_parallel({"tensor": 8, "fsdp": 2}),
}
for name, plan in plans.items():
    for kind in ("mha", "o"):
        arrays = MAPS[kind].arrays()
        want = outputs_and_gradients(plainly, MAPS[kind], arrays)
        with use(plan.bind()):
            got = outputs_and_gradients(by_plan, MAPS[kind], arrays)
        assert_trees_close(got, want)
        print(name, kind)
"""


def test_longer_rings_equal_plain_mathematics():
    flags = "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": "64"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 6
