"""What gates are given and what they decide, and what all of them share.

All of it is done sequence by sequence, so that nothing depends on the mesh or on how a batch is cut
into microbatches.
"""

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from colossax.config import nearest
from colossax.errors import InputError

PRIORITIES = ("position", "probability", "random")

NEVER = -1e30
"""A score that is never chosen."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GateInput:
    """What gates decide by.

    Attributes:
        logits: `[b, s, e]` float32, of the router.
        valid: `[b, s]`, whether a token is one; padding is not.
        token_ids: `[b, s]`, or None.
        token_index: `[b, s]`, place of each token in its sequence.
        bias: `[e]`, added to scores for the choice alone, or None.
        key: `[b]`, one for each row, of this layer and step, or None: without noise, and by
            position where places are drawn.
        decoding: Whether tokens come one after another, so that none may look at later ones.
    """

    logits: Float[Array, "b s e"]
    valid: Bool[Array, "b s"]
    token_index: Int[Array, "b s"]
    token_ids: Any = None
    bias: Any = None
    key: Any = None
    decoding: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """What a gate decided.

    Attributes:
        expert: `[b, s, k]` int32; the number of experts where there is none.
        weight: `[b, s, k]` float32.
        scores: `[b, s, e]` float32, of each token summing to 1: what balance losses take.
        dropped: Choices that the gate's own capacity dropped, a float32 scalar.
        asked: `expert` before that, by which experts are balanced; None: nothing was dropped.
    """

    expert: Int[Array, "b s k"]
    weight: Float[Array, "b s k"]
    scores: Float[Array, "b s e"]
    dropped: Any = 0.0
    asked: Any = None


@runtime_checkable
class Gate(Protocol):
    """A way to choose experts."""

    @property
    def choices(self) -> float:
        """Experts of a token, on average."""
        ...

    def width(self, experts: int) -> int:
        """Last dim of `Routing.expert` with so many experts, where tokens are not decoded."""
        ...

    def __call__(self, given: GateInput) -> Routing:
        """Decide for all tokens."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """What experts take of a sequence: gates that have it drop the rest.

    Attributes:
        factor: Of an even share: an expert takes `ceil(factor k s / e)` choices of a sequence of s.
        priority: Whose come first: earlier tokens, those of higher probability, or any at random
            (random token selection, Kim et al. 2021); without a key, earlier ones.
    """

    factor: float
    priority: str = "position"

    def __post_init__(self):
        if not 0 < self.factor < math.inf:
            raise InputError(
                f"gate.capacity: found a factor of {self.factor}; give a number above 0, as 1.25"
            )
        check_known(self.priority, PRIORITIES, "gate.capacity.priority")


def shares_of(scores: Array) -> Array:
    """Of each token summing to 1; softmax has them so."""
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)


def at(scores: Array, expert: Array) -> Array:
    return jnp.take_along_axis(scores, expert, axis=-1, mode="clip")


def grouped_by(x: Array, groups: int, experts: int) -> Array:
    if experts % groups:
        raise InputError(
            f"gate: {groups} groups do not divide {experts} experts; give a number that does"
        )
    return x.reshape(*x.shape[:-1], groups, experts // groups)


def routed(given: GateInput, expert: Array, weight: Array, scores: Array) -> Routing:
    """Padding goes nowhere."""
    experts = given.logits.shape[-1]
    expert = jnp.where(given.valid[..., None], expert, experts).astype(jnp.int32)
    return Routing(expert=expert, weight=jnp.where(expert < experts, weight, 0.0), scores=scores)


def limited(
    given: GateInput, routing: Routing, limit: Capacity | None, *, firsts_first: bool = False
) -> Routing:
    """What experts take of each sequence; while tokens come one after another, everything."""
    if limit is None or given.decoding:
        return routing
    experts, (_, length, k) = given.logits.shape[-1], routing.expert.shape
    tokens = jnp.sum(given.valid, axis=-1)
    most = jnp.ceil(limit.factor * k * tokens / experts).astype(jnp.int32)
    choice = jnp.arange(k)
    by_token = _priority(given, routing, limit.priority)
    keys = [by_token, jnp.broadcast_to(choice, routing.expert.shape).astype(by_token.dtype)]
    if firsts_first:
        keys = keys[::-1]
    flat = [each.reshape(-1, length * k) for each in (*keys[::-1], routing.expert)]
    order = jnp.lexsort(flat, axis=-1)
    sorted_experts = jnp.take_along_axis(flat[-1], order, axis=-1)
    place = jnp.arange(length * k)
    first = jax.vmap(lambda found: jnp.searchsorted(found, found))(sorted_experts)
    rank = jnp.zeros_like(order)
    rank = jnp.put_along_axis(rank, order, place - first, axis=-1, inplace=False)
    kept = (rank < most[:, None]).reshape(routing.expert.shape)
    chosen = routing.expert < experts
    return dataclasses.replace(
        routing,
        expert=jnp.where(kept, routing.expert, experts),
        weight=jnp.where(kept, routing.weight, 0.0),
        dropped=jnp.sum(chosen & ~kept).astype(jnp.float32),
        asked=routing.expert,
    )


def _priority(given: GateInput, routing: Routing, priority: str) -> Array:
    """Of each choice, the lower the sooner."""
    shape = routing.expert.shape
    if priority == "probability":
        return jnp.broadcast_to(-jnp.max(routing.weight, axis=-1, keepdims=True), shape)
    if priority == "random" and given.key is not None:
        drawn = _drawn(jax.random.uniform, given, given.valid.shape[1:])
        return jnp.broadcast_to(_in_place(given, drawn)[..., None], shape)
    return jnp.broadcast_to(given.token_index[..., None].astype(jnp.float32), shape)


def gumbel(given: GateInput) -> Array:
    """Noise for logits; none without a key."""
    if given.key is None:
        return jnp.zeros_like(given.logits)
    return _in_place(given, _drawn(jax.random.gumbel, given, given.logits.shape[1:]))


def row_keys(key: Array, rows: int) -> Array:
    """A random key for each row, from one or as many."""
    if key.ndim:
        return key
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))


def _drawn(draw: Any, given: GateInput, shape: tuple[int, ...]) -> Array:
    """Of each row by its own key, so that it does not matter which rows come together."""
    return jax.vmap(lambda key: draw(key, shape))(given.key)


def _in_place(given: GateInput, drawn: Array) -> Array:
    """Numbers drawn for the tokens of a sequence in their order, where the tokens lie."""
    place = jnp.clip(given.token_index, 0, drawn.shape[1] - 1)
    return jnp.take_along_axis(drawn, place.reshape(*place.shape, *(1,) * (drawn.ndim - 2)), axis=1)


def check_choices(k: int, experts: int) -> None:
    if k > experts:
        raise InputError(
            f"gate.k: {k} experts of a token, and there are {experts}; give at most {experts}"
        )


def check_known(value: str, known: tuple[str, ...], where: str) -> None:
    if value not in known:
        raise InputError(f"{where}: unknown '{value}'{nearest(value, known)}")


def check_count(value: int, where: str) -> None:
    if value < 1:
        raise InputError(f"{where}: found {value}; give 1 or more")
