"""How tokens are chosen from logits: for each seat as its request asks, all by one program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from colossax.scheduling.request import MOST_BIASED, MOST_LOGPROBS

LEAST_SHARE = 1e-6
"""Of `top_p`: below it nothing is reached by nothing."""

_BITS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Draws:
    """What the requests of all seats ask of their draws, a row each: data, so it compiles nothing.

    Attributes:
        temperature: Logits are divided by it; 0 takes the likeliest token; float32.
        seed: The token at position p is drawn with `fold_in(key(seed), p)`; uint32.
        top_k: Only so many likeliest tokens, and those as likely as the last; 0: all; int32.
        top_p: Only the likeliest tokens that make up this share; float32.
        min_p: Only tokens at least this share as likely as the likeliest; float32.
        presence: Taken off logits of tokens that were said; float32.
        frequency: Likewise, once for each time; float32.
        begin: Position of the first token that is said, not asked; int32.
        bias_tokens: `[r, MOST_BIASED]` int32; negative: none.
        bias_values: What is added to their logits, float32.
        logprobs: Whether log-probabilities are asked for; bool.
        source: How many tokens of a source the seat has read; int32.
        adapter: Number of its adapter, from 1; 0: none; int32.
        kept: First pages, or those of heavy hitters, pages of a window and places of a ring,
            `[r, 3]` int32; 0: all is kept.
    """

    temperature: Any
    seed: Any
    top_k: Any
    top_p: Any
    min_p: Any
    presence: Any
    frequency: Any
    begin: Any
    bias_tokens: Any
    bias_values: Any
    logprobs: Any
    source: Any
    adapter: Any
    kept: Any

    @classmethod
    def empty(cls, seats: int) -> "Draws":
        """Of seats that nobody has, in host memory."""

        def filled(value: Any, dtype: str, *more: int) -> np.ndarray:
            return np.full((seats, *more), value, dtype)

        return cls(
            temperature=filled(0, "float32"),
            seed=filled(0, "uint32"),
            top_k=filled(0, "int32"),
            top_p=filled(1, "float32"),
            min_p=filled(0, "float32"),
            presence=filled(0, "float32"),
            frequency=filled(0, "float32"),
            begin=filled(0, "int32"),
            bias_tokens=filled(-1, "int32", MOST_BIASED),
            bias_values=filled(0, "float32", MOST_BIASED),
            logprobs=filled(False, "bool"),
            source=filled(0, "int32"),
            adapter=filled(0, "int32"),
            kept=filled(0, "int32", 3),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a step gives for each seat; with drafts for each of the tokens that it may say.

    Attributes:
        token: `[r]` int32; with drafts `[r, 1 + d]`, and all else likewise.
        logprob: Of it, before penalties, biases and temperature, `[r]` float32; 0 where nobody
            asks for log-probabilities.
        top_tokens: The likeliest, `[r, MOST_LOGPROBS]` int32.
        top_logprobs: Likewise of theirs.
        sound: Whether the logits were numbers and any token was left to choose, `[r]` bool.
        count: With drafts, how many of a seat's tokens are said, `[r]` int32; None: one.
        scored: Of tokens of prompts, see `Scored`; None: the step has room for none.
    """

    token: Any
    logprob: Any
    top_tokens: Any
    top_logprobs: Any
    sound: Any
    count: Any = None
    scored: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Several:
    """Of rows of logits of which a seat has several: behind each of its drafted tokens.

    Attributes:
        seat: Of each row, `[n]` int32.
        known: Position behind the last token that the seat has said, `[n]` int32.
        drafted: Tokens drafted behind it, `[n, d]` int32.
        before: Which of them come before the token to choose, `[n, d]` bool.
    """

    seat: Any
    known: Any
    drafted: Any
    before: Any


def ranked(
    logits: Float[Array, "n v"],
    draws: Draws,
    said: Int[Array, "r s"],
    position: Int[Array, " n"],
    mask: UInt32[Array, "r words"],
    masked: Bool[Array, ""],
    several: Several | None = None,
) -> tuple[Float[Array, "n v"], Bool[Array, " n"]]:
    """Numbers whose highest is the next token of each seat, or of each of several rows of seats.

    Where tokens are drawn, noise is in them: the second highest is what would be drawn if the
    highest could not be.

    Penalties and biases are of logits; then the mask; then temperature; then `top_k`, `top_p` of
    what that leaves, and `min_p`.

    Args:
        logits: Of each seat's last token; rows of seats that emit nothing are anything.
        draws: What is asked, by seat.
        said: Tokens of each seat, by position.
        position: Of the tokens to choose.
        mask: A bit for each token that may come, from the lowest of the first word on.
        masked: Whether any bit is 0.
        several: Whose rows they are; None: each seat has one.

    Returns:
        The numbers, and of which rows the logits were numbers and any token was left.

    Cost: passes over `[r, v]`, of what nobody asks for none: 3 for the likeliest token, 64 more
    where `top_k` and `top_p` are asked for (thresholds are found bit by bit, nothing is sorted).
    """
    if several is not None:
        draws = jax.tree.map(lambda x: x[several.seat], draws)
    logits = logits.astype(jnp.float32)
    sound = jnp.isfinite(jnp.max(logits, axis=-1)) & ~jnp.any(jnp.isnan(logits), axis=-1)
    changed = jax.lax.cond(
        jnp.any((draws.presence != 0) | (draws.frequency != 0)),
        lambda x: _penalised(x, draws, said, position, several),
        lambda x: x,
        logits,
    )
    changed = jax.lax.cond(
        jnp.any(draws.bias_tokens >= 0), lambda x: _biased(x, draws), lambda x: x, changed
    )
    changed = jax.lax.cond(masked, lambda x: _allowed(x, mask, several), lambda x: x, changed)
    sound &= jnp.any(changed > -jnp.inf, axis=-1)
    drawn = jax.lax.cond(
        jnp.any(draws.temperature > 0),
        lambda x: jnp.where(draws.temperature[:, None] > 0, _drawn(x, draws, position), x),
        lambda x: x,
        changed,
    )
    return drawn, sound


def choose(
    logits: Float[Array, "n v"],
    draws: Draws,
    said: Int[Array, "r s"],
    position: Int[Array, " n"],
    mask: UInt32[Array, "r words"],
    masked: Bool[Array, ""],
    several: Several | None = None,
) -> Chosen:
    """The next token of each row, the highest of its `ranked`; arguments likewise."""
    drawn, sound = ranked(logits, draws, said, position, mask, masked, several)
    token = jnp.argmax(drawn, axis=-1).astype(jnp.int32)
    asked = draws.logprobs if several is None else draws.logprobs[several.seat]
    logprob, top_tokens, top_logprobs = jax.lax.cond(
        jnp.any(asked), told, untold, logits.astype(jnp.float32), token
    )
    return Chosen(
        token=token,
        logprob=logprob,
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        sound=sound,
    )


def _penalised(
    x: Array, draws: Draws, said: Array, position: Array, several: Several | None
) -> Array:
    """Less what has been said already, and drafted before."""
    at = jnp.arange(said.shape[1], dtype=jnp.int32)
    if several is not None:
        said, position = said[several.seat], several.known
    own = (at >= draws.begin[:, None]) & (at < position[:, None])
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    to = jnp.where(own, said, x.shape[1])
    counts = jnp.zeros(x.shape, jnp.float32).at[rows, to].add(1.0, mode="drop")
    if several is not None:
        drafted = jnp.where(several.before, several.drafted, x.shape[1])
        counts = counts.at[rows, drafted].add(1.0, mode="drop")
    return x - draws.presence[:, None] * (counts > 0) - draws.frequency[:, None] * counts


def _biased(x: Array, draws: Draws) -> Array:
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    to = jnp.where(draws.bias_tokens < 0, x.shape[1], draws.bias_tokens)
    return x.at[rows, to].add(draws.bias_values, mode="drop")


def _allowed(x: Array, mask: Array, several: Several | None) -> Array:
    mask = mask if several is None else mask[several.seat]
    bits = (mask[..., None] >> jnp.arange(_BITS, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(x.shape[0], -1)[:, : x.shape[1]] == 1, x, -jnp.inf)


def _drawn(x: Array, draws: Draws, position: Array) -> Array:
    """What is left of `x / temperature` with noise: its highest is drawn from its softmax."""
    divisor = jnp.where(draws.temperature > 0, draws.temperature, 1.0)
    scaled = x / divisor[:, None]
    scaled = jax.lax.cond(
        jnp.any(draws.top_k > 0), lambda x: _of_top_k(x, draws.top_k), lambda x: x, scaled
    )
    scaled = jax.lax.cond(
        jnp.any(draws.top_p < 1), lambda x: _of_top_p(x, draws.top_p), lambda x: x, scaled
    )
    least = jnp.max(scaled, axis=-1) + jnp.log(draws.min_p)
    scaled = jnp.where(scaled >= least[:, None], scaled, -jnp.inf)
    keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))
    noise = jax.vmap(lambda key: jax.random.gumbel(key, x.shape[1:], x.dtype))
    return scaled + noise(keys(draws.seed, position))


def _of_top_k(x: Array, count: Array) -> Array:
    count = jnp.where(count > 0, count, x.shape[1])

    def enough(kept: Array) -> Array:
        return jnp.sum(kept, axis=-1) >= count

    return _above(x, enough)


def _of_top_p(x: Array, share: Array) -> Array:
    probabilities = jax.nn.softmax(x, axis=-1)
    least = jnp.maximum(share, LEAST_SHARE)

    def enough(kept: Array) -> Array:
        return jnp.sum(jnp.where(kept, probabilities, 0.0), axis=-1) >= least

    return jnp.where((share < 1)[:, None], _above(x, enough), x)


def _above(x: Float[Array, "r v"], enough: Any) -> Float[Array, "r v"]:
    """Of each row the numbers from the highest threshold up that leaves enough; -inf elsewhere.

    Floats are compared as whole numbers in the same order, whose bits are found from the highest
    down.

    Args:
        x: Numbers.
        enough: Of `[r, v]` bool, whether a row of what is kept is enough.
    """
    whole = jax.lax.bitcast_convert_type(x, jnp.uint32)
    ordered = jnp.where(whole >> (_BITS - 1) == 1, ~whole, whole | jnp.uint32(1 << (_BITS - 1)))

    def with_bit(i: Array, threshold: Array) -> Array:
        bit = jnp.uint32(1) << (_BITS - 1 - i).astype(jnp.uint32)
        higher = threshold | bit
        return jnp.where(enough(ordered >= higher[:, None]), higher, threshold)

    threshold = jax.lax.fori_loop(0, _BITS, with_bit, jnp.zeros(x.shape[:1], jnp.uint32))
    return jnp.where(ordered >= threshold[:, None], x, -jnp.inf)


def told(logits: Array, token: Array) -> tuple[Array, Array, Array]:
    """Log-probability of each token, and the likeliest with theirs."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    count = min(MOST_LOGPROBS, logits.shape[1])
    top, tokens = jax.lax.top_k(logprobs, count)
    more = ((0, 0), (0, MOST_LOGPROBS - count))
    return (
        jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0],
        jnp.pad(tokens.astype(jnp.int32), more, constant_values=-1),
        jnp.pad(top, more, constant_values=-jnp.inf),
    )


def untold(logits: Array, _token: Array) -> tuple[Array, Array, Array]:
    """In place of `told`, of nothing."""
    rows = logits.shape[0]
    return (
        jnp.zeros((rows,), jnp.float32),
        jnp.full((rows, MOST_LOGPROBS), -1, jnp.int32),
        jnp.zeros((rows, MOST_LOGPROBS), jnp.float32),
    )
