"""What a new run of a text takes from a checkpoint: model, adapter and tokenizer."""

from typing import Any

from colossax.checkpoint import find_checkpoint
from colossax.config import from_json
from colossax.errors import CheckpointError
from colossax.models import config_from_json
from colossax.nn.config import AdapterConfig
from colossax.tasks.config import TrainConfig


def initial_model(path: str) -> Any:
    """Configuration of a checkpoint's model.

    Args:
        path: Folder of a run, of checkpoints, or of one step.

    Raises:
        CheckpointError: There is no checkpoint, or it names no model.
    """
    return config_from_json(_document(path, "model"))


def initial_adapter(path: str) -> AdapterConfig | None:
    """Configuration of a checkpoint's adapter; None where it is of a whole model.

    Args:
        path: Folder of a run, of checkpoints, or of one step.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    found = find_checkpoint(path).document("adapter", dict)
    if found is None:
        return None
    return from_json(AdapterConfig, found, where="adapter of the checkpoint")


def initial_tokenizer(config: TrainConfig) -> str | None:
    """The tokenizer, as JSON, of the checkpoint that the run starts from, if it has one."""
    if config.init is None:
        return None
    return find_checkpoint(config.init).document("tokenizer", str)


def _document(path: str, name: str) -> Any:
    found = find_checkpoint(path)
    document = found.document(name, dict)
    if document is None and found.document("drafter", dict) is not None:
        raise CheckpointError(
            f"checkpoint '{path}' holds a drafter, which drafts for another model; give that one's"
            " checkpoint"
        )
    if document is None:
        raise CheckpointError(
            f"checkpoint '{path}' names no {name}; give one that colossax train or colossax import"
            " wrote"
        )
    return document
