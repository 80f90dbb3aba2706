"""What a new run takes from a checkpoint: model, parameters and tokenizer."""

from typing import Any

import jax
import numpy as np

from colossax.checkpoint import Checkpointer, find_checkpoint, slot_of
from colossax.errors import CheckpointError
from colossax.models import config_from_json
from colossax.sharding import param_sharding
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig
from colossax.typing import Params

_PARAMS = "model/params"


def with_initial_model(config: TrainConfig, path: str) -> TrainConfig:
    """`config` with a checkpoint's model, to start from its parameters.

    Args:
        config: Whatever its model is.
        path: Folder of a run, of checkpoints, or of one step.

    Raises:
        CheckpointError: There is no checkpoint, or it names no model.
    """
    model = config_from_json(_document(path, "model"))
    return config.replace(init=path, model=model)


def initial_tokenizer(config: TrainConfig) -> str | None:
    """The tokenizer, as JSON, of the checkpoint that the run starts from, if it has one."""
    if config.init is None:
        return None
    return find_checkpoint(config.init).documents().get("tokenizer")


def initial_params(config: TrainConfig, step: Step) -> Params:
    """The checkpoint's parameters in the dtype and layout of the step.

    Each device reads its own shards, and host memory what lives there.

    Raises:
        CheckpointError: Records are missing, of another model, or damaged.
    """
    assert config.init is not None
    found = find_checkpoint(config.init)
    dtype = np.dtype(step.bound.plan.precision.params)
    infos, structure = jax.tree.flatten(step.spec.infos)
    wants = [
        (slot_of(info, _PARAMS, dtype=dtype), param_sharding(step.bound, "params", info))
        for info in infos
    ]
    arrays = Checkpointer(found.directory).restore(found.step, wants, convert=True)
    return jax.tree.unflatten(structure, arrays)


def _document(path: str, name: str) -> Any:
    documents = find_checkpoint(path).documents()
    if name not in documents:
        raise CheckpointError(
            f"checkpoint '{path}' names no {name}; give one that colossax train or colossax import"
            " wrote"
        )
    return documents[name]
