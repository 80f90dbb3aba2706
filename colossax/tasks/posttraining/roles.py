"""Models that a run has beside the one that learns from conversations."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from colossax.checkpoint import find_checkpoint
from colossax.checkpoint.base import checksum
from colossax.data import Tokenizer
from colossax.errors import CheckpointError, InputError
from colossax.models import config_from_json, maker
from colossax.nn import MakeModels, as_target, with_new_head
from colossax.nn.config import HeadConfig
from colossax.nn.config.reading import reads_text_alone
from colossax.tasks.initial import initial_adapter, initial_model
from colossax.tasks.posttraining.config import CRITIC, LEARNER, TEACHER, frozen_beside


def with_beside(config: Any, make_model: MakeModels) -> MakeModels:
    """Factories of all models of a run.

    A teacher that is not named yet is taken to be of the student's size, as to look at a run does
    not need it. A critic learns as a whole, also where the policy has an adapter.

    Args:
        config: The run, a `TrainConfig`.
        make_model: Of the one that learns.

    Raises:
        InputError: A critic's checkpoint tells no number of a text.
        CheckpointError: There is none, or it names no model.
    """
    beside = frozen_beside(config)
    if isinstance(make_model, Mapping):
        return make_model
    made = {name: as_target(maker(_model_of(config, path))) for name, path in beside.items()}
    if config.objective.name == "ppo":
        made[CRITIC] = with_new_head(maker(critic_of(config)))
    return {LEARNER: make_model, **made} if made else make_model


def teacher_of(config: Any) -> Any:
    """Configuration of the model that a `TrainConfig`'s student learns from."""
    return _model_of(config, config.objective.teacher)


def _model_of(config: Any, path: str | None) -> Any:
    if path is None or path == config.init:
        return config.model
    return _read("objective.teacher", path, initial_model)


def _read(option: str, path: str, read: Callable[[str], Any]) -> Any:
    """What a checkpoint says; who asked for it is named where it cannot be read."""
    try:
        return read(path)
    except CheckpointError as problem:
        raise CheckpointError(f"{option}: {problem}") from problem


def critic_of(config: Any) -> Any:
    """Configuration of the critic of a `TrainConfig`'s policy: one number of each token.

    Raises:
        InputError: Its checkpoint tells something else.
        CheckpointError: There is none, or it names no model.
    """
    path = config.policy.critic
    model = config.model if path is None else _read("policy.critic", path, _stored_critic)
    head = getattr(model, "head", None)
    if not reads_text_alone(model.decoder()) or not hasattr(model, "head"):
        raise InputError(
            f"policy.critic: a {type(model).__name__} reads more than one text, or something else;"
            " a critic is a decoder of text"
        )
    if head is not None and (head.outputs != 1 or head.pool not in (None, "last")):
        raise InputError(
            f"policy.critic: '{path}' has the head {head}, and a critic tells one number; give the"
            " checkpoint of a model that rewards, or leave it out"
        )
    head = head or HeadConfig(outputs=1, bias=False)
    return dataclasses.replace(model, head=dataclasses.replace(head, pool=None))


def _stored_critic(path: str) -> Any:
    """Of a run with one; else the model that is there."""
    several = _several(path)
    return config_from_json(several[CRITIC]) if CRITIC in several else initial_model(path)


def _several(path: str) -> dict[str, Any]:
    """Configurations of a checkpoint's models beside the one that is stored as if alone."""
    return find_checkpoint(path).document("models", dict) or {}


def _holds_critic(path: str, option: str) -> bool:
    """Whether what is asked for is a critic, which is whole though the policy be an adapter."""
    return option == "policy.critic" and CRITIC in _several(path)


def which_beside(config: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Which checkpoints a run's frozen models are, as JSON: another one is another run.

    A critic is none of them: the run's own checkpoints hold it.

    Args:
        config: The run, a `TrainConfig`.
        tokenizer: Of the model that learns.

    Raises:
        InputError: A teacher is none, or reads other tokens; or a critic does.
        CheckpointError: One cannot be read.
    """
    beside = frozen_beside(config)
    if TEACHER in beside:
        path = config.objective.teacher
        if path is None:
            raise InputError(
                "objective.teacher: distill learns from what another model would say; name its"
                " checkpoint, as --objective.teacher runs/large"
            )
        _check_reads(config, path, "objective.teacher", teacher_of(config), tokenizer)
    if config.policy.critic is not None:
        model = critic_of(config)
        _check_reads(config, config.policy.critic, "policy.critic", model, tokenizer)
    return {name: [path, _told(path)] for name, path in beside.items() if path is not None}


def _told(path: str) -> int:
    """What tells a checkpoint's model from others, wherever it lies."""
    found = find_checkpoint(path)
    try:
        return checksum(found, LEARNER) or found.step
    except CheckpointError:  # of a version that kept no sums
        return found.step


def _check_reads(config: Any, path: str, option: str, model: Any, tokenizer: Tokenizer) -> None:
    """Refuse a model beside another that is no whole one, or reads other tokens."""
    if initial_adapter(path) is not None and not _holds_critic(path, option):
        raise InputError(
            f"{option}: '{path}' is an adapter; give the whole model, as colossax export --merge"
            " --as-checkpoint writes it"
        )
    has, wanted = model.decoder().vocab, config.model.decoder().vocab
    if has != wanted:
        raise InputError(
            f"{option}: '{path}' reads {has:,} tokens and the model that learns {wanted:,}; give"
            " one with its tokenizer"
        )
    known = find_checkpoint(path).document("tokenizer", str)
    if known is not None and Tokenizer.from_json(known).fingerprint != tokenizer.fingerprint:
        raise InputError(
            f"{option}: '{path}' has another tokenizer than the model that learns, so that its"
            " tokens mean other things; give one with the same"
        )
