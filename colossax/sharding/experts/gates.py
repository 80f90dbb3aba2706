"""Gates by which every token chooses for itself: data, called with a router's logits."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.errors import InputError
from colossax.sharding.experts.routing import (
    NEVER,
    Capacity,
    GateInput,
    Routing,
    at,
    check_choices,
    check_count,
    check_known,
    grouped_by,
    gumbel,
    limited,
    routed,
    shares_of,
)

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")


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
        group_score: Of a group: its highest score, or the sum of its two highest.
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
        check_count(self.k, "gate.k")
        check_known(self.score, SCORES, "gate.score")
        check_known(self.group_score, GROUP_SCORES, "gate.group_score")
        if self.groups and not 0 < self.kept_groups <= self.groups:
            raise InputError(
                f"gate.kept_groups: found {self.kept_groups} of {self.groups} groups; give 1 to"
                f" {self.groups}"
            )

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return float(self.k)

    def width(self, experts: int) -> int:
        """See `Gate`."""
        return self.k

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        experts = given.logits.shape[-1]
        check_choices(self.k, experts)
        scores = _scores(given.logits, self.score)
        ranked = scores if given.bias is None else scores + given.bias
        if self.groups:
            ranked = self._kept(ranked, experts)
        expert = jax.lax.top_k(ranked, self.k)[1]
        weight = at(scores, expert)
        if self.renormalise:
            weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
        routing = routed(given, expert, weight * self.scale, shares_of(scores))
        return limited(given, routing, self.capacity)

    def _check_reach(self, size: int) -> None:
        """Refuse more choices than the kept groups have experts, and two of a group of one."""
        if self.k > self.kept_groups * size:
            raise InputError(
                f"gate.k: {self.k} experts of a token, and kept_groups of {self.kept_groups} leaves"
                f" {self.kept_groups * size} to choose from; give at most as many, or more groups"
            )
        if self.group_score == "top2" and size < 2:
            raise InputError(
                f"gate.group_score: 'top2' is of two experts, and each of {self.groups} groups has"
                f" {size}; give 'max', or fewer groups"
            )

    def _kept(self, ranked: Array, experts: int) -> Array:
        grouped = grouped_by(ranked, self.groups, experts)
        self._check_reach(grouped.shape[-1])
        if self.group_score == "max":
            best = jnp.max(grouped, axis=-1)
        else:
            best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        chosen = jax.lax.top_k(best, self.kept_groups)[1]
        kept = jnp.any(chosen[..., None] == jnp.arange(self.groups), axis=-2)
        return jnp.where(kept[..., None], grouped, NEVER).reshape(ranked.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTop1:
    """The best expert of each of k prototypes, weighed by softmax among its own (M6-T, 2021)."""

    k: int
    capacity: Capacity | None = None

    def __post_init__(self):
        check_count(self.k, "gate.k")

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return float(self.k)

    def width(self, experts: int) -> int:
        """See `Gate`."""
        return self.k

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        experts = given.logits.shape[-1]
        shares = jax.nn.softmax(grouped_by(given.logits, self.k, experts), axis=-1)
        best = jnp.argmax(shares, axis=-1)
        weight = jnp.max(shares, axis=-1)
        expert = best + jnp.arange(self.k) * (experts // self.k)
        scores = shares.reshape(given.logits.shape) / self.k
        return limited(given, routed(given, expert, weight, scores), self.capacity)


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
        check_count(self.k, "gate.k")
        check_count(self.groups, "gate.groups")

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return float(self.k)

    def width(self, experts: int) -> int:
        """See `Gate`."""
        return self.k

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        experts = given.logits.shape[-1]
        scores = jax.nn.softmax(given.logits, axis=-1)
        grouped = grouped_by(scores, self.groups, experts)
        check_choices(self.k, experts // self.groups)
        best = jnp.argmax(jnp.sum(grouped, axis=-1), axis=-1)
        inside = jnp.take_along_axis(grouped, best[..., None, None], axis=-2)[..., 0, :]
        weight, place = jax.lax.top_k(inside, self.k)
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        expert = best[..., None] * (experts // self.groups) + place
        return limited(given, routed(given, expert, weight, scores), self.capacity)


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

    def width(self, experts: int) -> int:
        """See `Gate`."""
        return 2

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        logits, experts = given.logits, given.logits.shape[-1]
        check_choices(2, experts)
        scores = jax.nn.softmax(logits, axis=-1)
        first = jnp.argmax(logits, axis=-1)
        rest = jnp.where(jnp.arange(experts) == first[..., None], NEVER, logits + gumbel(given))
        expert = jnp.stack([first, jnp.argmax(rest, axis=-1)], axis=-1)
        weight = at(scores, expert)
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        routing = routed(given, expert, weight, scores)
        limit = None if self.factor is None else Capacity(factor=self.factor)
        return limited(given, routing, limit, firsts_first=True)


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

    def __post_init__(self):
        check_count(self.vocab, "gate.vocab")

    @property
    def choices(self) -> float:
        """See `Gate`."""
        return 1.0

    def width(self, experts: int) -> int:
        """See `Gate`."""
        return 1

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        if given.token_ids is None:
            raise InputError("gate: Hash goes by token ids; give token_ids")
        experts = given.logits.shape[-1]
        table = jax.random.permutation(jax.random.key(self.seed), self.vocab) % experts
        expert = table[jnp.clip(given.token_ids, 0, self.vocab - 1)][..., None]
        scores = jax.nn.softmax(given.logits, axis=-1)
        weight = at(scores, expert) if self.scored else jnp.ones(expert.shape, jnp.float32)
        return routed(given, expert, weight, scores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseToSparse:
    """Every expert whose share is above a threshold, at least the best (Nie et al. 2021).

    Shares are a softmax with Gumbel noise at a temperature. In the paper it falls while one trains,
    so that fewer and fewer experts are above the threshold; here it stays as given.

    Attributes:
        threshold: Experts of no larger share are left out.
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
            check_count(self.most, "gate.most")

    @property
    def choices(self) -> float:
        """See `Gate`: no more than these can be above the threshold."""
        above = max(1.0, math.ceil(1 / self.threshold) - 1.0) if self.threshold else math.inf
        return float(min(above, self.most or above))

    def width(self, experts: int) -> int:
        """See `Gate`."""
        return min(experts, self.most or experts)

    def __call__(self, given: GateInput) -> Routing:
        """See `Gate`."""
        experts = given.logits.shape[-1]
        scores = jax.nn.softmax((given.logits + gumbel(given)) / self.temperature, axis=-1)
        weight, expert = jax.lax.top_k(scores, self.width(experts))
        kept = (weight > self.threshold) | (jnp.arange(weight.shape[-1]) == 0)
        return routed(given, jnp.where(kept, expert, experts), weight, scores)


def _scores(logits: Array, score: str) -> Array:
    return jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)
