"""What a new run takes from a checkpoint: parameters."""

import jax
import numpy as np

from colossax.checkpoint import Checkpointer, find_checkpoint, slot_of
from colossax.sharding import param_sharding
from colossax.step.step import Step
from colossax.typing import Params

_PARAMS = "model/params"


def initial_params(path: str, step: Step) -> Params:
    """A checkpoint's parameters in the dtype and layout of the step.

    Each device reads its own shards, and host memory what lives there.

    Args:
        path: Folder of a run, of checkpoints, or of one step.
        step: Whose parameters they become.

    Raises:
        CheckpointError: Records are missing, of another model, or damaged.
    """
    checkpoint = find_checkpoint(path)
    dtype = np.dtype(step.bound.plan.precision.params)
    infos, structure = jax.tree.flatten(step.spec.infos)
    wants = [
        (slot_of(info, _PARAMS, dtype=dtype), param_sharding(step.bound, "params", info))
        for info in infos
    ]
    arrays = Checkpointer(checkpoint.directory).restore(checkpoint.step, wants, convert=True)
    return jax.tree.unflatten(structure, arrays)
