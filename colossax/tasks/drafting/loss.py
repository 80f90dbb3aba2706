"""The loss of a drafter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from colossax.nn import DrafterConfig
from colossax.nn.drafting.drafter import DRAFTER, TARGET
from colossax.nn.loss.divergence import kl_divergence
from colossax.step.loss import Loss, Sums, Terms, any_order
from colossax.tasks.next_token import at_the_head, moved, next_token_terms
from colossax.typing import Batch

HIDDEN, KEYS, VALUES = "target_hidden", "target_keys", "target_values"
"""Arrays of the prepared batch: the target's final hidden states, and of its last layer."""


def drafting_loss(config: DrafterConfig) -> Loss:
    """`(1 - text) KL(target || drafter) + text CE`, over real targets.

    A draft is accepted with the probability that both distributions share, `1 - TV(p, q)`, which
    the divergence bounds; the text is only one draw of what the target might say. So the
    divergence is all of it by default.

    For models `{"target": ..., "drafter": ...}` with `drafting_options`. Where blocks begin is
    drawn for each row; in evaluation they begin at its first token.

    Args:
        config: Of the drafter.

    Cost: one forward pass of the target for each global batch, whose hidden states, keys and values
    of the last layer are kept, in the compute dtype; `kl_divergence`.
    Source: Du et al. 2024, GliDe with a CaPE; Zhou et al. 2024, DistillSpec.
    """

    @any_order
    def loss(models: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        drafter, target = models[DRAFTER], models[TARGET]
        hidden = drafter.hidden(
            target.embedded(batch["tokens"]),
            {"k": batch[KEYS], "v": batch[VALUES]},
            drawn_offsets(len(batch["tokens"]), config.block, row_keys),
            positions=batch.get("positions"),
            segments=batch.get("segments"),
        )
        terms: Terms = {}
        metrics: Sums = {}
        if config.text:
            told, metrics = next_token_terms(_Readout(target), hidden, {}, batch)
            total, count, _ = told["cross_entropy"]
            terms["cross_entropy"] = (total, count, config.text)
        if config.text < 1:
            terms["divergence"] = (*_divergence(target, hidden, batch), 1 - config.text)
        return terms, metrics

    return loss


def drafting_options(config: DrafterConfig) -> dict[str, Any]:
    """Fields of `StepOptions` that `drafting_loss` asks for."""

    def prepare(models: Any, batch: Batch) -> Batch:
        rows = {name: batch.get(name) for name in ("positions", "segments")}
        hidden, keys = models[TARGET].hidden_and_keys(batch["tokens"], **rows)
        told = {HIDDEN: hidden} if config.text < 1 else {}
        return {**batch, **told, KEYS: keys["k"], VALUES: keys["v"]}

    of_heads = ("batch", "seq", "kv_heads", "head_dim")
    dims = {HIDDEN: ("batch", "seq", None), KEYS: of_heads, VALUES: of_heads}
    return {"prepare": prepare, "batch_dims": dims}


def drawn_offsets(rows: int, block: int, row_keys: Array | None) -> Int[Array, " b"]:
    """Where blocks begin in each row, see `block_mask`; 0 where there are no keys."""
    if row_keys is None:
        return jnp.zeros(rows, jnp.int32)
    return jax.vmap(lambda key: jax.random.randint(key, (), 0, block))(row_keys)


def _divergence(target: Any, hidden: Array, batch: Batch) -> tuple[Array, Array]:
    """Summed over real targets, and how many those are."""
    weights = batch["weights"].astype(jnp.float32)
    head = jax.lax.stop_gradient(target.head_weight())
    shared, cuts = at_the_head(head.shape, hidden.shape[1])
    own, told, rows = moved(shared, hidden, batch[HIDDEN], weights)
    return kl_divergence(own, head, told, head, rows, **cuts), jnp.sum(weights)


@dataclasses.dataclass(frozen=True)
class _Readout:
    """The target's head without what its layers count."""

    target: Any

    @property
    def readout(self) -> dict[str, Any]:
        return self.target.readout

    def head_weight(self) -> Array:
        return jax.lax.stop_gradient(self.target.head_weight())
