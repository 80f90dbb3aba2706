"""One jitted step over a fixed number of flat tokens, for prompts and single tokens alike."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, UInt

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.inference.plan import inference_plan
from colossax.nn import CacheSpec, DecoderConfig, FlatTokens, ModelSpec
from colossax.sharding import cache_spec, replicated, use
from colossax.typing import Params

TOKENS_PER_STEP = 16

_NEEDED = ("decode", "logits", "cache_spec", "config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """A finished continuation.

    Attributes:
        prompt_tokens: What was asked.
        tokens: What the model added, an end-of-sequence token included where it came.
        ended: Whether the end-of-sequence token came, rather than the limit.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    ended: bool


class Generator:
    """Continues one prompt at a time with parameters laid out by a plan.

    Cost: one compilation, at first use. A step computes `tokens_per_step` tokens in every layer and
    the head for one of them; a prompt of p tokens takes ceil(p / tokens_per_step) steps, each
    further token one. Holds `2 layers slots kv_heads head_dim` cache items over the devices that
    split `kv_heads`; the cache is donated from step to step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        params: Params,
        *,
        slots: int | None = None,
        eos: int | None = None,
        tokens_per_step: int = TOKENS_PER_STEP,
    ):
        """Prepare the step.

        Args:
            spec: The model, as `describe` gave it under `bound`; the families of
                `colossax.models`, or any model with their `decode`, `logits`, `cache_spec`
                and `config`.
            bound: Where the parameters live.
            params: Laid out by `bound`; kept, not donated. Layers in host memory are fetched one
                after another. Shapes with shardings do for `lowered`.
            slots: Longest prompt and continuation together; default the model's `max_seq`.
            eos: Token that ends a continuation; default the model's, if it names one.
            tokens_per_step: Flat tokens of a step.

        Raises:
            InputError: The model cannot decode, or `slots` is above its `max_seq`.
        """
        if tokens_per_step < 1:
            raise InputError(f"tokens_per_step: found {tokens_per_step}; give 1 or more")
        self.config = _config(spec, params)
        self.slots = _slots(self.config, slots)
        self.eos = self.config.eos if eos is None else eos
        self.tokens_per_step = tokens_per_step
        self.bound = BoundPlan(inference_plan(bound.plan), bound.mesh)
        self._params = params
        self._cache_spec: CacheSpec = spec.merge(params).cache_spec(seats=1, slots=self.slots)
        self._layout = _cache_layout(self.bound, self._cache_spec)
        self._empty = jax.jit(self._zeros, out_shardings=self._layout)
        step = functools.partial(decode_step, spec, self.bound)
        out = (replicated(self.bound), self._layout)
        self._step = jax.jit(step, donate_argnums=1, out_shardings=out)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Generation:
        """Continue `prompt` until the end-of-sequence token or `max_tokens`.

        Args:
            prompt: Token ids, at least one.
            max_tokens: Most tokens to add.
            temperature: Logits are divided by it before sampling; 0 takes the likeliest token.
            seed: The token at position p is drawn with `fold_in(key(seed), p)`, so it depends on
                neither the mesh nor the way the prompt was cut.

        Raises:
            InputError: The prompt is empty, holds ids outside the vocabulary, or does not fit
                into `slots` together with `max_tokens`; a temperature or seed below 0.
        """
        prompt = tuple(map(int, prompt))
        tokens = tuple(
            self.stream(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        )
        ended = tokens[-1] == self.eos
        return Generation(prompt_tokens=prompt, tokens=tokens, ended=ended)

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[int]:
        """The tokens of `generate` as they come."""
        prompt = [int(token) for token in prompt]
        self._check(prompt, max_tokens, temperature, seed)
        return self._tokens(prompt, max_tokens, np.float32(temperature), np.uint32(seed))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Shapes and shardings of what a step gets: parameters, cache, tokens and numbers."""
        whole = replicated(self.bound)
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._params
        )
        cache = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._layout[name])
            for name, x in jax.eval_shape(self._zeros).items()
        }
        numbers = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
            for shape, dtype in (
                ((self.tokens_per_step,), np.int32),
                ((), np.int32),
                ((), np.int32),
                ((), np.float32),
                ((), np.uint32),
            )
        ]
        return (params, cache, *numbers)

    def lowered(self) -> Any:
        """The step as `generate` runs it, traced and not compiled."""
        return self._step.lower(*self.arguments)

    def _tokens(
        self, prompt: list[int], max_tokens: int, temperature: np.float32, seed: np.uint32
    ) -> Iterator[int]:
        cache, pending, start = self._empty(), prompt, 0
        for _ in range(max_tokens):
            token, cache = self._feed(cache, pending, start, temperature, seed)
            start += len(pending)
            pending = [int(token)]
            yield pending[0]
            if pending[0] == self.eos:
                return

    def _feed(
        self,
        cache: dict[str, Array],
        tokens: list[int],
        start: int,
        temperature: np.float32,
        seed: np.uint32,
    ) -> tuple[Array, dict[str, Array]]:
        """Put tokens at positions from `start` on, a step's worth at a time; the token after."""
        width = self.tokens_per_step
        token: Any = None
        for i in range(0, len(tokens), width):
            chunk = tokens[i : i + width]
            ids = np.zeros(width, np.int32)
            ids[: len(chunk)] = chunk
            at = np.int32(start + i), np.int32(len(chunk))
            token, cache = self._step(self._params, cache, ids, *at, temperature, seed)
        return token, cache

    def _zeros(self) -> dict[str, Array]:
        return self._cache_spec.zeros(self.bound.plan.precision)

    def _check(self, prompt: list[int], max_tokens: int, temperature: float, seed: int) -> None:
        check_tokens(prompt, self.config.vocab)
        if max_tokens < 1:
            raise InputError(f"max_tokens: found {max_tokens}; give 1 or more")
        if not (0 <= temperature < float("inf")):
            raise InputError(f"temperature: found {temperature}; give 0 (greedy) or more")
        if not 0 <= seed < 2**32:
            raise InputError(f"seed: found {seed}; give 0 to {2**32 - 1}")
        check_length(len(prompt), max_tokens, self.slots)


def check_tokens(prompt: Sequence[int], vocab: int) -> None:
    """Refuse an empty prompt, or ids outside the vocabulary.

    Raises:
        InputError: Naming the id.
    """
    if not prompt:
        raise InputError("prompt: it is empty; give at least one token to continue")
    outside = next((t for t in prompt if not 0 <= t < vocab), None)
    if outside is not None:
        raise InputError(
            f"prompt: token {outside} is outside the vocabulary of {vocab};"
            f" use ids from 0 to {vocab - 1}"
        )


def check_length(prompt: int, max_tokens: int, limit: int) -> None:
    """Refuse a prompt, or a prompt with its continuation, above `limit` tokens.

    Raises:
        InputError: With the numbers.
    """
    if prompt >= limit:
        raise InputError(
            f"prompt: it has {prompt} tokens, and at most {limit - 1} leave room for a next one"
            f" in a sequence of {limit}; shorten it"
        )
    if prompt + max_tokens > limit:
        raise InputError(
            f"max_tokens: a prompt of {prompt} and {max_tokens} more make {prompt + max_tokens}"
            f" tokens, above the longest sequence of {limit}; ask for at most {limit - prompt}"
        )


def decode_step(
    spec: ModelSpec,
    bound: BoundPlan,
    params: Params,
    cache: dict[str, Array],
    tokens: Int[Array, " t"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    temperature: Float[Array, ""],
    seed: UInt[Array, ""],
) -> tuple[Int[Array, ""], dict[str, Array]]:
    """Put `count` tokens (the rest is padding) at positions from `start` on, and choose the next.

    Returns:
        The token after the last of them, and the cache with them in it.
    """
    offset = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    valid = offset < count
    position = jnp.where(valid, start + offset, 0)
    flat = FlatTokens(seat=jnp.where(valid, 0, -1), position=position, slot=position)
    with use(bound):
        model = spec.merge(params)
        hidden, cache = model.decode(tokens, cache, flat)
        logits = model.logits(hidden[count - 1][None])[0].astype(jnp.float32)
    key = jax.random.fold_in(jax.random.key(seed), start + count)
    return sample(logits, temperature, key), cache


def sample(logits: Float[Array, " v"], temperature: Float[Array, ""], key: Array) -> Int[Array, ""]:
    """A token drawn from `softmax(logits / temperature)`; the likeliest at temperature 0."""
    divisor = jnp.where(temperature > 0, temperature, 1.0)
    drawn = jax.random.categorical(key, logits / divisor)
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32)


def _config(spec: ModelSpec, params: Params) -> DecoderConfig:
    model = spec.merge(params)
    missing = next((name for name in _NEEDED if not hasattr(model, name)), None)
    if missing is not None:
        raise InputError(
            f"model: {type(model).__name__} has no '{missing}', which generation needs;"
            f" give it {', '.join(_NEEDED)} as colossax.nn.Decoder has them"
        )
    return model.config


def _slots(config: DecoderConfig, slots: int | None) -> int:
    if slots is None:
        return config.max_seq
    if not 1 < slots <= config.max_seq:
        raise InputError(
            f"slots: found {slots}, but the model's longest sequence is {config.max_seq};"
            f" give 2 to {config.max_seq}"
        )
    return slots


def _cache_layout(bound: BoundPlan, spec: CacheSpec) -> dict[str, NamedSharding]:
    return {
        name: NamedSharding(bound.mesh, cache_spec(bound, one.shape, one.dims))
        for name, one in spec.arrays.items()
    }
