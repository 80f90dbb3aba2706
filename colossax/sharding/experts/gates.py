"""Gates: which experts each token takes, and by what weight.

A gate is data. It gets router logits in float32 and gives a `Routing`; tokens that are none are
routed nowhere. All of it is done sequence by sequence, so that nothing depends on the mesh or on
how a batch is cut into microbatches.
"""

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from colossax.config import nearest
from colossax.errors import InputError

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")
PRIORITIES = ("position", "probability", "random")

_NEVER = -1e30


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
        key: Of this layer and step, or None: without noise.
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
    """

    expert: Int[Array, "b s k"]
    weight: Float[Array, "b s k"]
    scores: Float[Array, "b s e"]
    dropped: Any = 0.0


@runtime_checkable
class Gate(Protocol):
    """A way to choose experts."""

    @property
    def choices(self) -> float:
        """Experts of a token, on average."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether what a token gets depends on tokens behind it."""
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
            (random token selection, Kim et al. 2021).
    """

    factor: float
    priority: str = "position"

    def __post_init__(self):
        if not 0 < self.factor < math.inf:
            raise InputError(
                f"gate.capacity: found a factor of {self.factor}; give a number above 0, as 1.25"
            )
        _known(self.priority, PRIORITIES, "gate.capacity.priority")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK:
    """The k experts of highest score.

    | gate | fields |
    |---|---|
    | Switch (Fedus et al. 2021) | `k=1` |
    | Mixtral, Qwen3-MoE, gpt-oss (a softmax of the chosen logits is the same) | `renormalise` |
    | Qwen2-MoE, OLMoE | none |
    | DeepSeek-V2 | `groups`, `kept_groups`, `scale` |
    | DeepSeek-V3 | those, `score="sigmoid"`, `group_score="top2"`, `renormalise`, a bias |
    | Llama 4 | `k=1`, `score="sigmoid"`, its weight put on the input |
    | FSMoE | `score="sigmoid"` |

    Attributes:
        k: Experts of a token.
        score: Softmax over all experts, or sigmoid of each.
        renormalise: Weights of the chosen sum to 1, before `scale`.
        scale: Times which weights are taken.
        groups: Experts stand in so many groups; 0: in none.
        kept_groups: Groups of which experts are chosen.
        group_score: Of a group: its highest score, or the sum of its two highest. With `top2` what
            is not kept scores 0 and not below everything, as DeepSeek-V3's own code has it.
        capacity: What experts take of a sequence; None: everything.
    """

    k: int
    score: str = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 0
    kept_groups: int = 0
    group_score: str = "max"
    capacity: Capacity | None = None

    def __post_init__(self):
        _at_least_one(self.k, "gate.k")
        _known(self.score, SCORES, "gate.score")
        _known(self.group_score, GROUP_SCORES, "gate.group_score")
        if self.groups and not 0 < self.kept_groups <= self.groups:
            raise InputError(
                f"gate.kept_groups: found {self.kept_groups} of {self.groups} groups; give 1 to"
                f" {self.groups}"
            )

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return float(self.k)

    @property
    def looks_ahead(self) -> bool:
        """See `Gate`."""
        return self.capacity is not None and self.capacity.priority != "position"

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        experts = given.logits.shape[-1]
        _check_choices(self.k, experts)
        scores = _scores(given.logits, self.score)
        ranked = scores if given.bias is None else scores + given.bias
        if self.groups:
            ranked = self._kept(ranked, experts)
        expert = jax.lax.top_k(ranked, self.k)[1]
        weight = _at(scores, expert)
        if self.renormalise:
            weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
        routing = _routed(given, expert, weight * self.scale, _shares(scores))
        return _limited(given, routing, self.capacity)

    def _kept(self, ranked: Array, experts: int) -> Array:
        grouped = _grouped(ranked, self.groups, experts)
        if self.group_score == "max":
            best, lowest = jnp.max(grouped, axis=-1), _NEVER
        else:
            best, lowest = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1), 0.0
        chosen = jax.lax.top_k(best, self.kept_groups)[1]
        kept = jnp.any(chosen[..., None] == jnp.arange(self.groups), axis=-2)
        return jnp.where(kept[..., None], grouped, lowest).reshape(ranked.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTop1:
    """The best expert of each of k prototypes, weighed by softmax among its own (M6-T, 2021)."""

    k: int
    capacity: Capacity | None = None

    def __post_init__(self):
        _at_least_one(self.k, "gate.k")

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return float(self.k)

    @property
    def looks_ahead(self) -> bool:
        """See `Gate`."""
        return self.capacity is not None and self.capacity.priority != "position"

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        experts = given.logits.shape[-1]
        shares = jax.nn.softmax(_grouped(given.logits, self.k, experts), axis=-1)
        best = jnp.argmax(shares, axis=-1)
        weight = jnp.max(shares, axis=-1)
        expert = best + jnp.arange(self.k) * (experts // self.k)
        scores = shares.reshape(given.logits.shape) / self.k
        return _limited(given, _routed(given, expert, weight, scores), self.capacity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hierarchical:
    """The k best experts of the best group (SAM, Jiang et al. 2021).

    Attributes:
        k: Experts of a token.
        groups: Of experts; the best has the highest sum of probabilities.
        capacity: What experts take of a sequence; None: everything.
    """

    k: int
    groups: int
    capacity: Capacity | None = None

    def __post_init__(self):
        _at_least_one(self.k, "gate.k")
        _at_least_one(self.groups, "gate.groups")

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return float(self.k)

    @property
    def looks_ahead(self) -> bool:
        """See `Gate`."""
        return self.capacity is not None and self.capacity.priority != "position"

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        experts = given.logits.shape[-1]
        scores = jax.nn.softmax(given.logits, axis=-1)
        grouped = _grouped(scores, self.groups, experts)
        _check_choices(self.k, experts // self.groups)
        best = jnp.argmax(jnp.sum(grouped, axis=-1), axis=-1)
        inside = jnp.take_along_axis(grouped, best[..., None, None], axis=-2)[..., 0, :]
        weight, place = jax.lax.top_k(inside, self.k)
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        expert = best[..., None] * (experts // self.groups) + place
        return _limited(given, _routed(given, expert, weight, scores), self.capacity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GShard:
    """The best expert, and a second one drawn among the others (Lepikhin et al. 2020).

    The second is the best of logits with Gumbel noise; without a key, of logits. Weights of both
    sum to 1. Experts take `2 factor s / e` choices of a sequence, firsts before seconds.

    Attributes:
        factor: Capacity over an even share; None: all are taken.
    """

    factor: float | None = 1.0

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return 2.0

    @property
    def looks_ahead(self) -> bool:
        """See `Gate`: a second choice waits for all first ones."""
        return self.factor is not None

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        logits, experts = given.logits, given.logits.shape[-1]
        _check_choices(2, experts)
        scores = jax.nn.softmax(logits, axis=-1)
        first = jnp.argmax(logits, axis=-1)
        rest = jnp.where(jnp.arange(experts) == first[..., None], _NEVER, logits + _gumbel(given))
        expert = jnp.stack([first, jnp.argmax(rest, axis=-1)], axis=-1)
        weight = _at(scores, expert)
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        routing = _routed(given, expert, weight, scores)
        limit = None if self.factor is None else Capacity(factor=self.factor)
        return _limited(given, routing, limit, firsts_first=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hash:
    """A fixed expert for each token id (Roller et al. 2021), as even as can be.

    Attributes:
        vocab: Token ids.
        seed: Of the table.
        scored: Its softmax probability is the weight; else 1.
    """

    vocab: int
    seed: int = 0
    scored: bool = False

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return 1.0

    @property
    def looks_ahead(self) -> bool:
        """See `Gate`."""
        return False

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        if given.token_ids is None:
            raise InputError("gate: Hash goes by token ids; give token_ids")
        experts = given.logits.shape[-1]
        table = jax.random.permutation(jax.random.key(self.seed), self.vocab) % experts
        expert = table[jnp.clip(given.token_ids, 0, self.vocab - 1)][..., None]
        scores = jax.nn.softmax(given.logits, axis=-1)
        weight = _at(scores, expert) if self.scored else jnp.ones(expert.shape, jnp.float32)
        return _routed(given, expert, weight, scores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseToSparse:
    """Every expert whose share is above a threshold, at least the best (Nie et al. 2021).

    Shares are a softmax with Gumbel noise at a temperature that falls while one trains, so that
    fewer and fewer experts are above the threshold.

    Attributes:
        threshold: Share below which an expert is left out.
        temperature: Of the softmax.
        most: Most experts of a token; None: all.
    """

    threshold: float
    temperature: float = 1.0
    most: int | None = None

    def __post_init__(self):
        if not 0 <= self.threshold < 1:
            raise InputError(f"gate.threshold: found {self.threshold}; give a share, 0 to below 1")
        if not 0 < self.temperature < math.inf:
            raise InputError(f"gate.temperature: found {self.temperature}; give a number above 0")
        if self.most is not None:
            _at_least_one(self.most, "gate.most")

    @property
    def choices(self) -> float:
        """See `Gate`: no more than these can be above the threshold."""
        above = 1 / self.threshold if self.threshold else math.inf
        return float(min(above, self.most or above)) if min(above, self.most or above) else 1.0

    @property
    def looks_ahead(self) -> bool:
        """See `Gate`."""
        return False

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        experts = given.logits.shape[-1]
        scores = jax.nn.softmax((given.logits + _gumbel(given)) / self.temperature, axis=-1)
        weight, expert = jax.lax.top_k(scores, min(experts, self.most or experts))
        kept = (weight > self.threshold) | (jnp.arange(weight.shape[-1]) == 0)
        return _routed(given, jnp.where(kept, expert, experts), weight, scores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """Each expert takes the tokens of a sequence that score it highest (Zhou et al. 2022).

    Attributes:
        k: Experts of a token on average: an expert takes `ceil(k s / e)` tokens of a sequence.
    """

    k: int

    def __post_init__(self):
        _at_least_one(self.k, "gate.k")

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return float(self.k)

    @property
    def looks_ahead(self) -> bool:
        """See `Gate`."""
        return True

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        experts = given.logits.shape[-1]
        _check_choices(self.k, experts)
        scores = jax.nn.softmax(given.logits, axis=-1)
        tokens = jnp.sum(given.valid, axis=-1)
        taken = -(-self.k * tokens // experts)[:, None, None]
        masked = jnp.where(given.valid[..., None], scores, -1.0)
        # Ties go to earlier tokens.
        order = jnp.lexsort((given.token_index[..., None] + jnp.zeros_like(masked), -masked), 1)
        rank = jnp.argsort(order, axis=1)
        expert = jnp.where(rank < taken, jnp.arange(experts), experts)
        return _routed(given, expert, scores, scores)


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

    @property
    def looks_ahead(self) -> bool:
        """See `Gate`."""
        return True

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        if given.decoding:
            expert = jnp.argmax(given.logits, axis=-1)
        else:
            assign = jax.vmap(lambda s, valid: auction(s, valid, self.tolerance))
            expert = assign(jax.lax.stop_gradient(given.logits), given.valid)
        weight = jax.nn.sigmoid(_at(given.logits, expert[..., None]))
        return _routed(given, expert[..., None], weight, jax.nn.softmax(given.logits, axis=-1))


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


def _scores(logits: Array, score: str) -> Array:
    return jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)


def _shares(scores: Array) -> Array:
    """Of each token summing to 1; softmax has them so."""
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)


def _at(scores: Array, expert: Array) -> Array:
    return jnp.take_along_axis(scores, expert, axis=-1, mode="clip")


def _grouped(x: Array, groups: int, experts: int) -> Array:
    if experts % groups:
        raise InputError(
            f"gate: {groups} groups do not divide {experts} experts; give a number that does"
        )
    return x.reshape(*x.shape[:-1], groups, experts // groups)


def _routed(given: GateInput, expert: Array, weight: Array, scores: Array) -> Routing:
    """Padding goes nowhere."""
    experts = given.logits.shape[-1]
    expert = jnp.where(given.valid[..., None], expert, experts).astype(jnp.int32)
    return Routing(expert=expert, weight=jnp.where(expert < experts, weight, 0.0), scores=scores)


def _limited(
    given: GateInput, routing: Routing, limit: Capacity | None, *, firsts_first: bool = False
) -> Routing:
    """What experts take of each sequence."""
    if limit is None:
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
    )


def _priority(given: GateInput, routing: Routing, priority: str) -> Array:
    """Of each choice, the lower the sooner."""
    shape = routing.expert.shape
    if priority == "probability":
        return jnp.broadcast_to(-jnp.max(routing.weight, axis=-1, keepdims=True), shape)
    if priority == "random":
        if given.key is None:
            raise InputError("gate: priority 'random' needs a random key; give key")
        drawn = jax.random.uniform(given.key, given.valid.shape)
        return jnp.broadcast_to(_in_place(given, drawn)[..., None], shape)
    return jnp.broadcast_to(given.token_index[..., None].astype(jnp.float32), shape)


def _gumbel(given: GateInput) -> Array:
    """Noise for logits; none without a key."""
    if given.key is None:
        return jnp.zeros_like(given.logits)
    return _in_place(given, jax.random.gumbel(given.key, given.logits.shape))


def _in_place(given: GateInput, drawn: Array) -> Array:
    """Numbers drawn for the tokens of a sequence in their order, where the tokens lie."""
    place = jnp.clip(given.token_index, 0, drawn.shape[1] - 1)
    return jnp.take_along_axis(drawn, place.reshape(*place.shape, *(1,) * (drawn.ndim - 2)), axis=1)


def _check_choices(k: int, experts: int) -> None:
    if k > experts:
        raise InputError(
            f"gate.k: {k} experts of a token, and there are {experts}; give at most {experts}"
        )


def _known(value: str, known: tuple[str, ...], where: str) -> None:
    if value not in known:
        raise InputError(f"{where}: unknown '{value}'{nearest(value, known)}")


def _at_least_one(value: int, where: str) -> None:
    if value < 1:
        raise InputError(f"{where}: found {value}; give 1 or more")
