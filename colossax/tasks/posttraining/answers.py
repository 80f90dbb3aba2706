"""What a model says of the answers of a batch: a row holds several, each a document of its own."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.errors import InputError
from colossax.nn import Models, token_logps
from colossax.step.loss import Loss, Sums, Terms, any_order
from colossax.tasks.next_token import (
    at_the_head,
    hidden_states,
    moved,
    real_tokens,
    split_vocabulary,
)
from colossax.tasks.posttraining.config import LEARNER
from colossax.typing import Batch

POLICY = "policy"
"""Name of the model that learns, beside others; in a run it is `LEARNER`."""

REFERENCE_LOGPS = "reference_logps"
"""Array of the prepared batch, `[b, s]`: what the reference says of the tokens that are told."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """Of each of a row's first k documents the tokens that are told, which are its answer.

    Attributes:
        logps: `[b, k]`, the sum of their log-probabilities.
        tokens: `[b, k]`, how many they are; 0 where a row has no such document.
    """

    logps: Float[Array, "b k"]
    tokens: Float[Array, "b k"]

    @property
    def there(self) -> Float[Array, "b k"]:
        """1 where there is an answer, else 0."""
        return (self.tokens > 0).astype(jnp.float32)

    @property
    def means(self) -> Float[Array, "b k"]:
        """Log-probability per token; 0 where there is none."""
        return self.logps / jnp.maximum(self.tokens, 1.0)

    def every(self, first: int, step: int) -> "Answers":
        """Those of documents `first`, `first + step`, ..."""
        return Answers(logps=self.logps[:, first::step], tokens=self.tokens[:, first::step])


def policy_of(models: Any) -> Any:
    """The model that learns, of several by its name: `policy`, or in a run `model`.

    Raises:
        InputError: None has that name.
    """
    if not isinstance(models, Models):
        return models
    return named(models, LEARNER if LEARNER in models else POLICY, "that learns")


def named(models: Models, name: str, kind: str) -> Any:
    """One of several models.

    Args:
        models: All.
        name: Which.
        kind: What it is, for people.

    Raises:
        InputError: None has that name.
    """
    if name not in models:
        raise InputError(
            f"{name}: of the models {sorted(models)} none is it; name the one {kind} so"
        )
    return models[name]


def told_logps(
    model: Any, batch: Batch, row_keys: Array | None = None, *, temperature: float = 1.0
) -> tuple[Float[Array, "b s"], dict[str, Any]]:
    """Log-probability of each target, and what the model's layers counted.

    Cost: see `hidden_states` and `nn.token_logps`.
    """
    hidden, sums = hidden_states(model, batch, row_keys)
    head = model.head_weight()
    shared, cuts = at_the_head(head.shape, hidden.shape[1])
    hidden, targets = moved(shared, hidden, batch["targets"])
    logps = token_logps(
        hidden,
        head,
        targets,
        temperature=temperature,
        **split_vocabulary(head.shape, shared),
        **cuts,
        **getattr(model, "readout", {}),
    )
    return logps, sums


def answers_of(logps: Float[Array, "b s"], batch: Batch, documents: int) -> Answers:
    """The answers of a batch.

    Args:
        logps: Of its targets.
        batch: With `weights`, 1 for a token that is told.
        documents: How many of a row count, k.
    """
    weights = batch["weights"].astype(jnp.float32)
    told, tokens = (by_document(x, batch, documents) for x in (logps * weights, weights))
    return Answers(logps=told, tokens=tokens)


def by_document(values: Float[Array, "b s"], batch: Batch, documents: int) -> Float[Array, "b k"]:
    """Sums over the tokens of each of a row's first documents, in whatever order tokens lie.

    Cost: b k s additions; of a sequence that is split each device adds its own, `[b, k]` are sent.
    """
    segments = batch.get("segments")
    if segments is None:
        segments = jnp.zeros(values.shape, jnp.int32)
    of = segments[:, None] == jnp.arange(documents)[:, None]
    return jnp.sum(jnp.where(of, values[:, None], 0.0), axis=-1)


def counted(values: Float[Array, "b k"], there: Float[Array, "b k"]) -> tuple[Array, Array]:
    """Their total, and how many there are."""
    return jnp.sum(values * there), jnp.sum(there)


def check_documents(documents: int, objective: str, *, of: int) -> None:
    """Refuse a number of documents that is no multiple of those that belong together.

    Raises:
        InputError: That.
    """
    if type(documents) is not int or documents < of or documents % of:
        wanted = "an even number of 2 or more, for pairs" if of == 2 else "1 or more"
        raise InputError(f"{objective}: documents is {documents!r}; give {wanted}")


def telling(inner: Loss) -> Loss:
    """A loss with a term `told`, which adds nothing: the share of the tokens read that is told.

    So a step's `tokens` are those that are read, whatever else the loss is divided by.
    """

    @any_order
    def loss(models: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        terms, metrics = inner(models, batch, row_keys=row_keys)
        told = jnp.sum(batch["weights"].astype(jnp.float32))
        return {**terms, "told": (told, real_tokens(batch), 0.0)}, metrics

    return loss
