"""The next-token loss of language models."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis, at_least
from colossax.errors import InputError, PlanError
from colossax.layerwise import Maximum
from colossax.nn import VocabParts, cross_entropy
from colossax.sharding import activation_axes, constrain, current
from colossax.step.loss import Loss, Sums, Terms, any_order
from colossax.typing import (
    FRAMES,
    PIXELS,
    SOURCE,
    SOURCE_SEGMENTS,
    TEXT_BATCH_DIMS,
    TOKEN_TYPES,
    Batch,
    TrainState,
)

Evaluate = Callable[[TrainState, Batch], dict[str, Any]]


def next_token_loss(*, z_loss: float = 0.0) -> Loss:
    """Cross entropy of the next token over real targets, for models like `nn.Decoder`.

    What the model's layers count is reported beside it, `[layers, ...]` each: sums per token that
    is no padding, maxima as they are. What its `auxiliary` names are terms of the loss: over all
    layers, likewise per token.

    Args:
        z_loss: Coefficient of the mean squared log-partition, which keeps logits from drifting
            (Chowdhery et al. 2022, PaLM, use 1e-4).

    Raises:
        InputError: It is below 0 or not finite.
    """
    at_least(0).check(z_loss, "z_loss")

    @any_order
    def loss(model: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        if not getattr(getattr(model, "config", None), "causal", True):
            raise InputError(
                "next_token_loss: the model's attention is not causal, so it sees the token that it"
                " is to tell; use masked_token_loss, with rows that are masked"
            )
        return next_token_terms(model, *hidden_states(model, batch, row_keys), batch, z_loss=z_loss)

    return loss


def next_token_terms(
    model: Any,
    hidden: Array,
    sums: dict[str, Any],
    batch: Batch,
    *,
    z_loss: float = 0.0,
    beside: Terms | None = None,
) -> tuple[Terms, Sums]:
    """What `next_token_loss` gives of hidden states that are there.

    Args:
        model: Whose they are.
        hidden: See `hidden_states`.
        sums: What its layers counted.
        batch: Text.
        z_loss: See `next_token_loss`.
        beside: Further terms.
    """
    weights = batch["weights"].astype(jnp.float32)
    # The head is gathered here, once, not in the loop over chunks, where it would be again
    # for every chunk and in both directions.
    head = model.head_weight()
    shared, cuts = at_the_head(head.shape, hidden.shape[1])
    hidden, targets, weights = moved(shared, hidden, batch["targets"], weights)
    ce, z, _, correct = cross_entropy(
        hidden,
        head,
        targets,
        weights,
        z_loss=bool(z_loss),
        **split_vocabulary(head.shape, shared),
        **cuts,
        **getattr(model, "readout", {}),
    )
    # Counted apart from the loss, so that it visibly depends on the batch alone.
    count = jnp.sum(weights)
    terms: Terms = {"cross_entropy": (ce, count, 1.0), **(beside or {})}
    if z_loss:
        terms["z_loss"] = (z, count, z_loss)
    return with_counted(model, batch, sums, terms, {"accuracy": (correct, count)})


def with_counted(
    model: Any, batch: Batch, sums: Mapping[str, Any], terms: Terms, metrics: Sums
) -> tuple[Terms, Sums]:
    """A loss's terms and metrics with what the model's layers counted: its `auxiliary` are terms.

    Args:
        model: Whose layers they are.
        batch: Text.
        sums: See `hidden_states`.
        terms: Of the loss.
        metrics: Of the loss.
    """
    terms, metrics = dict(terms), dict(metrics)
    tokens, sums = real_tokens(batch), dict(sums)
    for name, coefficient in getattr(model, "auxiliary", {}).items():
        terms[name] = (jnp.sum(sums.pop(name)), tokens, coefficient)
    # What is told of a step as its tokens: so a total is a mean times those.
    told = functools.reduce(jnp.maximum, [weight for _, weight, _ in terms.values()])
    for name, value in sums.items():
        weight = told if name == "dropped_choices" else tokens
        metrics[name] = value if isinstance(value, Maximum) else (value, weight)
    return terms, metrics


def hidden_states(
    model: Any, batch: Batch, row_keys: Array | None = None
) -> tuple[Array, dict[str, Any]]:
    """What a model makes of the tokens or images of a batch, and what its layers counted.

    Args:
        model: As `nn.Decoder`.
        batch: With `tokens`, and what goes with them, as a source or `pixels`; or those alone.
        row_keys: A random key for each row, for models that draw; None: without noise.

    Raises:
        InputError: They are no tokens.
    """
    drawn = {"key": row_keys} if getattr(model, "draws", False) else {}
    if PIXELS in batch and "tokens" not in batch:
        return model.hidden(pixels=batch[PIXELS], **drawn)
    _check_text(batch)
    rows = {name: batch.get(name) for name in ("positions", "segments")}
    beside = (TOKEN_TYPES, SOURCE, SOURCE_SEGMENTS, FRAMES, PIXELS)
    rows |= {name: batch[name] for name in beside if name in batch}
    return model.hidden(batch["tokens"], **rows, **drawn)


def real_tokens(batch: Batch) -> Array:
    """How many are no padding, whether targets or not."""
    segments = batch.get("segments")
    if segments is None:
        return jnp.float32(batch["tokens"].size)
    return jnp.sum(segments >= 0).astype(jnp.float32)


def _check_text(batch: Batch) -> None:
    tokens = batch["tokens"]
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InputError(
            f"batch 'tokens': found {tokens.dtype}{list(tokens.shape)}; give whole numbers of shape"
            " [batch, seq]"
        )
    for name in filter(batch.__contains__, TEXT_BATCH_DIMS):
        if batch[name].shape != tokens.shape:
            raise InputError(
                f"batch '{name}': found shape {list(batch[name].shape)} beside tokens of"
                f" {list(tokens.shape)}; give one number for each token"
            )


def mean_loss(evaluate: Evaluate, state: TrainState, batches: Iterable[Batch]) -> float:
    """Cross entropy over all real target tokens of the batches together."""
    # What else a model counts may be arrays, or maxima.
    pairs = (jax.device_get(evaluate(state, batch)["cross_entropy"]) for batch in batches)
    total, weight = sum((np.asarray(pair, np.float64) for pair in pairs), start=np.zeros(2))
    return float(total / weight) if weight else float("nan")


def _stages_of_tokens(bound: BoundPlan | None, head: tuple[int, ...], tokens: int) -> int:
    """Stages that share the tokens of a row at the head, as they cannot share its vocabulary.

    Args:
        bound: The plan in force.
        head: Shape of the output matrix, `[d, v]`.
        tokens: Of a row.
    """
    stages = 1 if bound is None else bound.mesh.shape[MeshAxis.STAGE]
    if bound is None or stages == 1 or tokens % (_devices(bound, "seq") * stages):
        return 1
    by_vocab = MeshAxis.STAGE in activation_axes(bound, "vocab")
    return 1 if by_vocab and not head[1] % _devices(bound, "vocab") else stages


def _parts_of_stages(bound: BoundPlan | None, head: tuple[int, ...]) -> VocabParts | None:
    """Parts of the vocabulary that the stages have; None where they share it not, or not evenly.

    Args:
        bound: The plan in force.
        head: Shape of the output matrix, `[d, v]`.
    """
    axes = () if bound is None else activation_axes(bound, "vocab")
    if bound is None or axes[:1] != (MeshAxis.STAGE,):
        return None
    stages = bound.mesh.shape[MeshAxis.STAGE]
    if head[0] % stages or head[1] % _devices(bound, "vocab"):
        return None
    return VocabParts(count=stages, total=_SumOfStages(bound))


@dataclasses.dataclass(frozen=True)
class _SumOfStages:
    """Sum over dim 2 of `[b, s, stages, d]`, which each stage has a row of.

    Cost: per device, `2 (stages - 1) / stages` times its rows' bytes, as in an all-reduce; each
    stage sums a part of the width, in float32.
    """

    bound: BoundPlan

    def __call__(self, parts: Array) -> Array:
        stage = MeshAxis.STAGE.value
        rows = [activation_axes(self.bound, dim) or None for dim in ("batch:inner", "seq")]

        def laid(x: Array, *rest: str | None) -> Array:
            where = NamedSharding(self.bound.mesh, PartitionSpec(*rows, *rest))
            return jax.lax.with_sharding_constraint(x, where)

        # Each its own first: else the sum, wanted by width, is made by the compiler.
        turned = laid(laid(parts, stage, None), None, stage)
        total = jnp.sum(turned.astype(jnp.float32), axis=2).astype(parts.dtype)
        return laid(laid(total, stage), None)


def at_the_head(head: tuple[int, ...], tokens: int) -> tuple[int, dict[str, Any]]:
    """How the plan in force has losses of logits made.

    Args:
        head: Shape of the output matrix, `[d, v]`.
        tokens: Of a row.

    Returns:
        For `moved`, and what `cross_entropy` and `kl_divergence` are to be told.
    """
    bound = current()
    shared = _stages_of_tokens(bound, head, tokens)
    cuts = {
        "chunks": _chunks(bound, tokens),
        "batch_shards": _devices(bound, "batch:inner"),
        "seq_shards": _devices(bound, "seq") * shared,
        "reduction": None if bound is None else bound.plan.precision.reduction,
    }
    return shared, cuts


def split_vocabulary(head: tuple[int, ...], shared: int) -> dict[str, Any]:
    """What losses of logits are to be told of a vocabulary that is split over devices.

    Args:
        head: Shape of the output matrix, `[d, v]`.
        shared: Stages that share the tokens of a row; see `at_the_head`.
    """
    return {
        "vocab_sharded": _devices(current(), "vocab") > 1,
        "parts": _parts_of_stages(current(), head) if shared == 1 else None,
    }


def moved(stages: int, *arrays: Array) -> tuple[Array, ...]:
    """As the head multiplies: hidden states whole, rows where they leave the vocabulary split.

    Args:
        stages: That share the tokens of a row.
        *arrays: `[b, s]`, or `[b, s, d]`.
    """
    rows, bound = ("batch:inner", "seq"), current()
    if bound is None or stages == 1:
        return tuple(constrain(x, *rows, *(None,) * (x.ndim - 2)) for x in arrays)
    batch, seq = (activation_axes(bound, dim) for dim in rows)
    shared = NamedSharding(bound.mesh, PartitionSpec(batch, (*seq, MeshAxis.STAGE.value)))
    return jax.lax.with_sharding_constraint(arrays, shared)


def _devices(bound: BoundPlan | None, dim: str) -> int:
    """Devices that a dim of an activation is split over."""
    return 1 if bound is None else bound.size(activation_axes(bound, dim))


def _chunks(bound: BoundPlan | None, seq_len: int) -> int:
    """Pieces of the sequence in which logits are made, by the plan in force."""
    chunks = 1 if bound is None else bound.plan.loss.vocab_chunks
    if chunks > seq_len:
        raise PlanError(
            f"plan.loss.vocab_chunks: {chunks} is more than the {seq_len} tokens of a row;"
            f" give at most {seq_len}"
        )
    return chunks
