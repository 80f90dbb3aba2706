"""One of two processes of four devices: stages across both, or inside of each, equal one device.

python -m tests.step.stages.across ADDRESS PROCESS across|inside
"""

import sys

import jax
import numpy as np

MESHES = {"across": {"stage": 2, "fsdp": 2, "tensor": 2}, "inside": {"stage": 4, "ring": 2}}
LINES = {"across": {(0, 1)}, "inside": {(0, 0, 0, 0), (1, 1, 1, 1)}}
"""Processes of the stages that send to one another."""


def devices_of(how):
    """All eight in the order of the mesh; of `inside`, a ring has one of each process."""
    found = jax.devices()
    return found if how == "across" else [found[i] for n in range(4) for i in (n, n + 4)]


def lines_of(mesh):
    stages = np.moveaxis(mesh.devices, mesh.axis_names.index("stage"), -1)
    return {
        tuple(device.process_index for device in line)
        for line in stages.reshape(-1, mesh.shape["stage"])
    }


def assert_equal(how):
    from colossax.config import Plan, preset
    from tests.oracle import assert_losses_close, assert_trees_close
    from tests.step import test_parallel_oracle as oracle
    from tests.step.stages import test_stages as stages

    oracle.ONE = jax.local_devices()[:1]
    plan = preset("zero3+megatron", mesh=MESHES[how], segments=stages.FULL, **stages.piped(3))
    step = stages.step_of("packed", plan, devices_of(how))
    assert lines_of(step.bound.mesh) == LINES[how]
    state = step.init_from(jax.device_put(stages.start("packed"), step.shardings["params"]))
    rows = step.place(oracle.batch("packed", rows=12))

    def found(state, batch):
        got = step.gradients(state, batch)
        return got.grads, got.loss

    everywhere = jax.NamedSharding(step.bound.mesh, jax.P())
    grads, loss = jax.jit(found, out_shardings=everywhere)(state, rows)
    want, right = stages.gradients("packed", Plan(), oracle.ONE, 12)
    assert_trees_close(jax.tree.map(np.asarray, grads), want)
    assert_losses_close(float(loss), right)


def main(address, process, how):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    assert_equal(how)
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
