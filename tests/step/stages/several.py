"""Three steps of programs of stages, in one process of eight devices or in several that share them.

python -m tests.step.stages.several ADDRESS PROCESSES PROCESS CASE FOLDER

The first process writes what all have found as FOLDER/CASE-PROCESSES.npz.
"""

import os
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
    from tests.step.stages.test_programs import uneven

    one = {"stage": 2, "fsdp": 2, "tensor": 2}
    two = {"stage": 4, "fsdp": 2}
    return {
        "one": ("llama", uneven(one, 5, 3), list),
        "tied": ("gpt2", uneven(one, 5, 3), list),
        "two": ("llama", uneven(two, 3, 2, 2, 1), list),
        "chunks": ("gpt2", uneven(one, 1, 3, 2, 2, chunks=2), list),
        "zb_h1": ("llama", uneven(one, 3, 5, schedule="zb_h1"), list),
        "beside": ("llama", uneven({"stage": 2, "fsdp": 4}, 5, 3), turned),
        "crossed": ("gpt2", uneven({"stage": 2, "fsdp": 4}, 5, 3), crossed),
        "gpipe": ("bloom", uneven(two, 3, 2, 2, 1, schedule="gpipe"), list),
    }


def run(name, folder):
    """Losses, norms and totals of three steps and an evaluation, then of one from a checkpoint."""
    from colossax.models import maker
    from colossax.optim import adamw
    from colossax.planner import boost
    from colossax.tasks import next_token_loss
    from tests.step import test_parallel_oracle as oracle
    from tests.step.stages.test_stages import MODELS

    model, plan, order = cases()[name]
    loss = next_token_loss()
    state, step = boost(
        maker(MODELS[model]),
        adamw(1e-2),
        loss,
        plan,
        devices=order(jax.devices()),
        clip_norm=0.5,
        seed=3,
    )
    batch = oracle.batch(model, rows=8)
    told = {}

    def note(at, metrics):
        for key, value in jax.tree_util.tree_flatten_with_path(metrics)[0]:
            told[f"{at}{jax.tree_util.keystr(key)}"] = np.asarray(value)

    for at in range(3):
        state, metrics = step(state, batch)
        note(at, metrics)
    note("evaluated", step.evaluate(state, batch))
    step.save(folder, state)
    state = step.restore(folder)
    state, metrics = step(state, batch)
    note("restored", metrics)
    step.save(folder, state)
    return told


def main(address, processes, process, name, folder):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_num_cpu_devices", DEVICES // int(processes))
    if int(processes) > 1:
        jax.distributed.initialize(address, num_processes=int(processes), process_id=int(process))
    folder = Path(folder)
    told = run(name, folder / f"{name}-{processes}")
    if process == "0":
        np.savez(folder / f"{name}-{processes}.npz", **told)
    print("done", flush=True)


if __name__ == "__main__":
    os.environ.pop("XLA_FLAGS", None)
    main(*sys.argv[1:])
