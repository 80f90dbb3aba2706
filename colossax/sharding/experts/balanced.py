"""Gates that give every expert its share of a sequence: tokens depend on those behind them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from colossax.sharding.experts.routing import (
    GateInput,
    Routing,
    at,
    check_choices,
    check_count,
    routed,
)


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

    By auction: within `tolerance` for each token of the best assignment there is. Weights are the
    sigmoid of scores. While decoding, the best expert (Lewis et al. 2021, BASE layers).

    Attributes:
        tolerance: Least step of a bid.
    """

    tolerance: float = 1e-3

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
            assign = jax.vmap(lambda s, valid: auction(s, valid, self.tolerance))
            expert = assign(jax.lax.stop_gradient(given.logits), given.valid)
        weight = jax.nn.sigmoid(at(given.logits, expert[..., None]))
        return routed(given, expert[..., None], weight, jax.nn.softmax(given.logits, axis=-1))


def auction(
    scores: Float[Array, "s e"], valid: Bool[Array, " s"], tolerance: float
) -> Int[Array, " s"]:
    """An expert for each token, at most `ceil(tokens / e)` of them to each, by auction.

    Tokens without one bid for what they like best: as much over its price as leaves them no worse
    off than with their second best, and `tolerance`. Experts keep the highest bids. The sum of
    scores is within `tolerance` for each token of the highest (Bertsekas 1988).
    """
    experts = scores.shape[1]
    scores = jnp.nan_to_num(scores)  # bids must end
    places = -(-jnp.sum(valid) // experts)
    token = jnp.arange(scores.shape[0])

    def bidding(state: Any) -> Any:
        owner, bid, price = state
        (best, second), favourite = _two_best(scores - price)
        offer = price[favourite] + best - second + tolerance
        waiting = (owner == experts) & valid
        owner = jnp.where(waiting, favourite, owner)
        bid = jnp.where(waiting, offer, bid)
        order = jnp.lexsort((token, -bid, owner))
        starts = jnp.searchsorted(owner[order], jnp.arange(experts + 1))
        place = jnp.zeros_like(token).at[order].set(token) - starts[owner]
        kept = place < places
        lowest = jnp.full((experts + 1,), jnp.inf).at[owner].min(jnp.where(kept, bid, jnp.inf))
        full = jnp.zeros((experts + 1,), jnp.int32).at[owner].add(1) >= places
        price = jnp.where(full, lowest, jnp.append(price, 0.0))[:experts]
        return jnp.where(kept, owner, experts), bid, price

    def unfinished(state: Any) -> Array:
        return jnp.any((state[0] == experts) & valid)

    start = (jnp.full(token.shape, experts), jnp.zeros(token.shape), jnp.zeros((experts,)))
    return jax.lax.while_loop(unfinished, bidding, start)[0]


def _two_best(values: Array) -> tuple[tuple[Array, Array], Array]:
    if values.shape[1] == 1:
        return (values[:, 0], values[:, 0]), jnp.zeros(values.shape[:1], jnp.int32)
    two, which = jax.lax.top_k(values, 2)
    return (two[:, 0], two[:, 1]), which[:, 0]
