"""Models that a run has beside the one that learns from conversations."""

from collections.abc import Mapping
from typing import Any

from colossax.checkpoint import find_checkpoint
from colossax.data import Tokenizer
from colossax.errors import InputError
from colossax.models import maker
from colossax.nn import MakeModels, as_target
from colossax.tasks.initial import initial_adapter, initial_model
from colossax.tasks.posttraining.config import LEARNER, TEACHER, frozen_beside


def with_beside(config: Any, make_model: MakeModels) -> MakeModels:
    """Factories of all models of a run.

    A teacher that is not named yet is taken to be of the student's size, as to look at a run does
    not need it.

    Args:
        config: The run, a `TrainConfig`.
        make_model: Of the one that learns.

    Raises:
        CheckpointError: There is none, or it names no model.
    """
    beside = frozen_beside(config)
    if not beside or isinstance(make_model, Mapping):
        return make_model
    return {
        LEARNER: make_model,
        **{name: as_target(maker(_model_of(config, path))) for name, path in beside.items()},
    }


def teacher_of(config: Any) -> Any:
    """Configuration of the model that a `TrainConfig`'s student learns from."""
    return _model_of(config, config.objective.teacher)


def _model_of(config: Any, path: str | None) -> Any:
    return config.model if path is None or path == config.init else initial_model(path)


def which_beside(config: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Which checkpoints a run's frozen models are, as JSON: another one is another run.

    Args:
        config: The run, a `TrainConfig`.
        tokenizer: Of the model that learns.

    Raises:
        InputError: A teacher is none, or reads other tokens.
        CheckpointError: One cannot be read.
    """
    beside = frozen_beside(config)
    if TEACHER in beside:
        _check_teacher(config, tokenizer)
    paths = {name: path for name, path in beside.items() if path is not None}
    return {name: [path, find_checkpoint(path).step] for name, path in paths.items()}


def _check_teacher(config: Any, tokenizer: Tokenizer) -> None:
    path = config.objective.teacher
    if path is None:
        raise InputError(
            "objective.teacher: distill learns from what another model would say; name its"
            " checkpoint, as --objective.teacher runs/large"
        )
    if initial_adapter(path) is not None:
        raise InputError(
            f"objective.teacher: '{path}' is an adapter; give the whole model, as colossax export"
            " --merge --as-checkpoint writes it"
        )
    sizes = {"teacher": teacher_of(config).decoder().vocab, "student": config.model.decoder().vocab}
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"objective.teacher: '{path}' tells {sizes['teacher']:,} tokens and the student"
            f" {sizes['student']:,}; give a teacher with the student's tokenizer"
        )
    known = find_checkpoint(path).document("tokenizer", str)
    if known is not None and Tokenizer.from_json(known).fingerprint != tokenizer.fingerprint:
        raise InputError(
            f"objective.teacher: '{path}' has another tokenizer than the student, so that its"
            " tokens mean other things; give a teacher with the student's tokenizer"
        )
