"""Gates that give every expert its share of a sequence: tokens depend on those behind them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from colossax.errors import InputError
from colossax.sharding.experts.routing import (
    GateInput,
    Routing,
    at,
    check_choices,
    check_count,
    routed,
)

_ROUNDS_OF_A_STEP, _MOST_ROUNDS = 64, 1_024
"""Rounds of bids before their step doubles, and before an auction ends."""

_SPREAD = 16.0
"""Widest range of scores that an auction takes as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """Each expert takes the tokens of a sequence that score it highest (Zhou et al. 2022).

    While decoding, a token takes the k experts that it scores highest.

    Attributes:
        k: Experts of a token on average: an expert takes `ceil(k s / e)` tokens of a sequence.
    """

    k: int

    def __post_init__(self):
        check_count(self.k, "gate.k")

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return float(self.k)

    def width(self, experts: int) -> int:
        """See `Gate`: a token may be taken by all."""
        return experts

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        experts = given.logits.shape[-1]
        check_choices(self.k, experts)
        scores = jax.nn.softmax(given.logits, axis=-1)
        if given.decoding:
            weight, expert = jax.lax.top_k(scores, self.k)
            return routed(given, expert, weight, scores)
        tokens = jnp.sum(given.valid, axis=-1)
        taken = -(-self.k * tokens // experts)[:, None, None]
        masked = jnp.where(given.valid[..., None], scores, -1.0)
        # Ties go to earlier tokens.
        order = jnp.lexsort((given.token_index[..., None] + jnp.zeros_like(masked), -masked), 1)
        rank = jnp.argsort(order, axis=1)
        expert = jnp.where(rank < taken, jnp.arange(experts), experts)
        return routed(given, expert, scores, scores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """Each expert the same number of a sequence's tokens, of highest sum of scores.

    By auction: within `tolerance` for each token of the best assignment there is, or within more
    where that would take many rounds of bids; see `auction`. Weights are the sigmoid of scores.
    While decoding, the best expert (Lewis et al. 2021, BASE layers).

    Attributes:
        tolerance: Least step of a bid.
    """

    tolerance: float = 1e-3

    def __post_init__(self):
        if not 0 < self.tolerance < math.inf:
            raise InputError(
                f"gate.tolerance: found {self.tolerance}; give a number above 0, as 1e-3"
            )

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return 1.0

    def width(self, experts: int) -> int:
        """See `Gate`."""
        return 1

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        if given.decoding:
            expert = jnp.argmax(given.logits, axis=-1)
        else:
            assign = jax.vmap(lambda s, valid, index: auction(s, valid, index, self.tolerance)[0])
            scores = jax.lax.stop_gradient(given.logits)
            expert = assign(scores, given.valid, given.token_index)
        weight = jax.nn.sigmoid(at(given.logits, expert[..., None]))
        return routed(given, expert[..., None], weight, jax.nn.softmax(given.logits, axis=-1))


def auction(
    scores: Float[Array, "s e"],
    valid: Bool[Array, " s"],
    index: Int[Array, " s"],
    tolerance: float,
) -> tuple[Int[Array, " s"], Int[Array, ""]]:
    """An expert for each token, at most `ceil(tokens / e)` of them to each, and rounds of bids.

    Tokens without one bid for what they like best: as much over its price as leaves them no worse
    off than with their second best, and a step. Experts keep the highest bids. The sum of scores,
    as `_bounded` has them, is within the last step for each token of the highest (Bertsekas 1988).
    The step is `tolerance`, and doubles every 64 rounds, since equal tokens that want the same few
    experts raise prices by no more than it. After 1,024 rounds tokens without an expert take what
    is free: the first of them the first.
    """
    experts = scores.shape[1]
    scores = _bounded(scores, valid)
    places = -(-jnp.sum(valid) // experts)
    token = jnp.arange(scores.shape[0])

    def bidding(state: Any) -> Any:
        owner, bid, price, rounds = state
        step = tolerance * 2.0 ** (rounds // _ROUNDS_OF_A_STEP)
        (best, second), favourite = _two_best(scores - price)
        offer = price[favourite] + best - second + step
        waiting = (owner == experts) & valid
        owner = jnp.where(waiting, favourite, owner)
        bid = jnp.where(waiting, offer, bid)
        order = jnp.lexsort((index, -bid, owner))
        starts = jnp.searchsorted(owner[order], jnp.arange(experts + 1))
        place = jnp.zeros_like(token).at[order].set(token) - starts[owner]
        kept = place < places
        lowest = jnp.full((experts + 1,), jnp.inf).at[owner].min(jnp.where(kept, bid, jnp.inf))
        full = jnp.zeros((experts + 1,), jnp.int32).at[owner].add(1) >= places
        price = jnp.where(full, lowest, jnp.append(price, 0.0))[:experts]
        return jnp.where(kept, owner, experts), bid, price, rounds + 1

    def unfinished(state: Any) -> Array:
        return jnp.any((state[0] == experts) & valid) & (state[3] < _MOST_ROUNDS)

    start = (jnp.full(token.shape, experts), jnp.zeros(token.shape), jnp.zeros((experts,)), 0)
    owner, _, _, rounds = jax.lax.while_loop(unfinished, bidding, start)
    return _filled(owner, valid, index, places, experts), jnp.asarray(rounds)


def _bounded(scores: Array, valid: Array) -> Array:
    """Scores of a sequence below the best of each token, the lowest by no more than `_SPREAD`.

    What spreads further is scaled down, so that prices are small beside what float32 tells apart.
    Infinite numbers count as the highest and lowest of the others, and what is no number as the
    lowest.
    """
    finite = jnp.isfinite(scores) & valid[:, None]
    low = jnp.min(scores, initial=0.0, where=finite)
    high = jnp.max(scores, initial=0.0, where=finite)
    scores = jnp.clip(jnp.where(jnp.isnan(scores), low, scores), low, high)
    scores = scores / 2 - jnp.max(scores, axis=1, keepdims=True) / 2  # the widest would overflow
    spread = -jnp.min(scores, initial=0.0, where=valid[:, None])
    return scores * jnp.minimum(2.0, _SPREAD / jnp.maximum(spread, _SPREAD / 2))


def _filled(owner: Array, valid: Array, index: Array, places: Array, experts: int) -> Array:
    """Tokens without an expert take free places, in order of both."""
    left = (owner == experts) & valid
    free = places - jnp.zeros((experts + 1,), jnp.int32).at[owner].add(1)[:experts]
    order = jnp.lexsort((index, ~left))
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    found = jnp.searchsorted(jnp.cumsum(free), rank, side="right")
    return jnp.where(left, found, owner).astype(owner.dtype)


def _two_best(values: Array) -> tuple[tuple[Array, Array], Array]:
    if values.shape[1] == 1:
        return (values[:, 0], values[:, 0]), jnp.zeros(values.shape[:1], jnp.int32)
    two, which = jax.lax.top_k(values, 2)
    return (two[:, 0], two[:, 1]), which[:, 0]
