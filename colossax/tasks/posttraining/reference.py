"""What a frozen reference says of a batch, made once per step."""

from typing import Any

from colossax.errors import InputError
from colossax.nn import Models, has_adapter, without_adapter
from colossax.tasks.posttraining.answers import (
    REFERENCE_LOGPS,
    named,
    policy_of,
    told_logps,
)
from colossax.tasks.posttraining.config import REFERENCE
from colossax.typing import Batch


def reference_options(*, temperature: float = 1.0) -> dict[str, Any]:
    """Fields of `StepOptions` that objectives with a reference ask for.

    For `boost({"policy": ..., "reference": ...}, optimizer, dpo_loss(documents=8), plan,
    **reference_options())`; or of one model with an adapter, whose reference is the same model
    without it, so that no second copy of the weights is there.

    A batch that says it already, as `step.prepare` makes it, is left as it is.

    Args:
        temperature: That answers were drawn at, as `PolicyConfig` has it.

    Raises:
        InputError: When traced: one model is given and it has no adapter, or the reference has
            another vocabulary than the policy.

    Cost: the reference's forward pass over the global batch, and 4 bytes per token.
    """

    def prepare(models: Any, batch: Batch) -> Batch:
        if REFERENCE_LOGPS in batch:
            return batch
        return {**batch, REFERENCE_LOGPS: said_by_reference(models, batch, temperature)}

    return {
        "prepare": prepare,
        "trainable": lambda info: info.model != REFERENCE,
        "batch_dims": {REFERENCE_LOGPS: ("batch", "seq")},
    }


def said_by_reference(models: Any, batch: Batch, temperature: float = 1.0) -> Any:
    """Log-probability of each target, `[b, s]`, by the reference among `models`."""
    policy = policy_of(models)
    if isinstance(models, Models) and (REFERENCE in models or not has_adapter(policy)):
        reference = named(models, REFERENCE, "that is frozen")
        _check_vocabularies(policy, reference)
        return told_logps(reference, batch, temperature=temperature)[0]
    if not has_adapter(policy):
        raise InputError(
            f"{REFERENCE}: there is one model and it has no adapter, so nothing says what it was"
            " before; give two models by name, 'policy' and 'reference', or nn.with_adapter"
        )
    with without_adapter():
        return told_logps(policy, batch, temperature=temperature)[0]


def _check_vocabularies(policy: Any, reference: Any) -> None:
    has, other = (one.head_weight().shape[1] for one in (policy, reference))
    if has != other:
        told = f"{has:,} of the policy and {other:,} of '{REFERENCE}'"
        raise InputError(
            f"{REFERENCE}: the vocabularies have {told} tokens; give a reference with the tokenizer"
            " of the policy"
        )
