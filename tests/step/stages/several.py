"""Three steps of programs of stages, in one process of eight devices or in several that share them.

python -m tests.step.stages.several ADDRESS PROCESSES PROCESS CASE FOLDER

The first process writes what all have found as FOLDER/CASE-PROCESSES.npz. Checkpoints go to
FOLDER/CASE-PROCESSES; all go on with the one that one process has written.
"""

import sys
from pathlib import Path

import jax
import numpy as np

DEVICES = 8


def turned(devices):
    """Each stage of two on devices of both processes, partners of one process."""
    return [devices[at] for at in (0, 1, 4, 5, 2, 3, 6, 7)]


def crossed(devices):
    """Each stage on devices of both processes, partners of different ones."""
    return [devices[at] for at in (0, 1, 4, 5, 6, 7, 2, 3)]


def cases():
    """By name: model, plan, order of the devices."""
    from colossax.config import OffloadConfig
    from tests.step.stages.test_programs import uneven

    host = OffloadConfig(parameters=1.0, optimizer=1.0, activations=1.0)
    one = {"stage": 2, "fsdp": 2, "tensor": 2}
    two = {"stage": 4, "fsdp": 2}
    beside = uneven({"stage": 2, "fsdp": 4}, 5, 3)
    return {
        "one": ("llama", uneven(one, 5, 3), list),
        "tied": ("gpt2", uneven(one, 5, 3), list),
        "two": ("llama", uneven(two, 3, 2, 2, 1), list),
        "chunks": ("gpt2", uneven(one, 1, 3, 2, 2, chunks=2), list),
        "zb_h1": ("llama", uneven(one, 3, 5, schedule="zb_h1"), list),
        "beside": ("llama", beside, turned),
        "crossed": ("gpt2", uneven({"stage": 2, "fsdp": 4}, 5, 3), crossed),
        "gpipe": ("bloom", uneven(two, 3, 2, 2, 1, schedule="gpipe"), list),
        "host": ("gpt2", uneven(one, 5, 3).replace(offload=host), list),
        "host_beside": ("llama", beside.replace(offload=host), turned),
    }


def sums():
    """Layers of two kinds, with sums, variables, and parameters that do not learn."""
    from colossax.config import PipelineConfig, Plan
    from colossax.optim import adamw
    from colossax.planner import build_step
    from tests.step.stages.test_programs import Mixed, follow, mixed_loss

    pipeline = PipelineConfig(microbatches=4, cuts=(1, 2, 2, 1))
    step = build_step(
        Mixed,
        adamw(1e-2),
        mixed_loss,
        Plan(mesh={"stage": 4, "data": 2}, pipeline=pipeline),
        devices=jax.devices(),
        batch_dims={"x": ("batch", "embed")},
        variables={"mean": np.zeros(4, np.float32)},
        after_step=follow,
        clip_norm=0.5,
    )
    batch = {"x": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)}
    return step, step.init(3), batch


def of_case(name):
    """Step, first state and batch."""
    from colossax.models import maker
    from colossax.optim import adamw
    from colossax.planner import boost
    from colossax.tasks import next_token_loss
    from tests.step import test_parallel_oracle as oracle
    from tests.step.stages.test_stages import MODELS

    if name == "sums":
        return sums()
    model, plan, order = cases()[name]
    state, step = boost(
        maker(MODELS[model]),
        adamw(1e-2),
        next_token_loss(),
        plan,
        devices=order(jax.devices()),
        clip_norm=0.5,
        seed=3,
    )
    return step, state, oracle.batch(model, rows=8)


def run(name, folder, source):
    """What three steps, an evaluation, and a fourth from a checkpoint at `source` tell."""
    step, state, batch = of_case(name)
    told = {}

    def note(at, metrics):
        for key, value in jax.tree_util.tree_flatten_with_path(metrics)[0]:
            told[f"{at}{jax.tree_util.keystr(key)}"] = np.asarray(value)

    for at in range(3):
        state, metrics = step(state, batch)
        note(at, metrics)
    note("evaluated", step.evaluate(state, batch))
    note("variables", state["variables"])
    step.save(folder, state)
    state, metrics = step(step.restore(source), batch)
    note("restored", metrics)
    assert int(state["step"]) == 4
    for stage, dispatched in zip(step.updater.stages, step.jitted.conclude, strict=True):
        own = bool(stage.here.mesh.local_devices)
        assert own == (getattr(dispatched, "_cache_size", int)() > 0), "programs of other processes"
    return told


def main(address, processes, process, name, folder):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    if int(processes) > 1:
        jax.distributed.initialize(address, num_processes=int(processes), process_id=int(process))
    assert len(jax.devices()) == DEVICES
    folder = Path(folder)
    source = folder / f"{name}-1"
    told = run(name, folder / f"{name}-{processes}", source)
    if process == "0":
        np.savez(folder / f"{name}-{processes}.npz", **told)
    print("equal", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
