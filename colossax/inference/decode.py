"""The pure program that generation runs: tokens into the cache, the next token out."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.inference.cache import Cache, CacheLayout
from colossax.inference.plan import inference_plan, shapes_of
from colossax.inference.reading import Reading
from colossax.inference.scheduler import Call
from colossax.nn import DecoderConfig, FlatTokens, ModelSpec
from colossax.scheduling import Reads
from colossax.sharding import replicated, use
from colossax.typing import Params

TOKENS_PER_STEP = 16

_NEEDED = ("decode", "logits", "cache_spec", "config")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens of one sequence that go into its cache together.

    Attributes:
        ids: `[t]` int32; those behind `count` are padding.
        start: Position of the first, int32.
        count: How many are real, int32.
        source: How many tokens of a source were read before, int32; None: there is none.
    """

    ids: Any
    start: Any
    count: Any
    source: Any = None

    @classmethod
    def of(cls, call: Call, width: int) -> "Chunk":
        """A scheduler's call, filled up to `width` tokens."""
        ids = np.zeros(width, np.int32)
        ids[: len(call.tokens)] = call.tokens
        read = call.request.read
        return cls(
            ids=ids,
            start=np.int32(call.start),
            count=np.int32(len(call.tokens)),
            source=np.int32(read) if read else None,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; data, so that no choice needs a program of its own.

    Attributes:
        temperature: Logits are divided by it; 0 takes the likeliest token; float32.
        seed: The token at position p is drawn with `fold_in(key(seed), p)`; uint32.
    """

    temperature: Any
    seed: Any

    @classmethod
    def of(cls, call: Call) -> "Sampling":
        """As a scheduler's call asks."""
        request = call.request
        return cls(temperature=np.float32(request.temperature), seed=np.uint32(request.seed))


class DecodeProgram:
    """`decode(params, cache, tokens, sampling) -> (token, cache)`, compiled once.

    It keeps neither parameters nor cache: any parameters of the model's shapes, laid out alike,
    run through the one program.

    Cost: one compilation, at first use. A call computes `width` tokens in every layer and the head
    for one of them; the cache is donated.
    """

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        *,
        slots: int | None = None,
        width: int = TOKENS_PER_STEP,
    ):
        """Compile nothing yet.

        Args:
            spec: The model, as `describe` gave it under `bound`; the families of
                `colossax.models`, or any model with their `decode`, `logits`, `cache_spec`
                and `config`.
            bound: Where the parameters live.
            slots: Longest prompt and continuation together; default the model's `max_seq`.
            width: Flat tokens of a call.

        Raises:
            InputError: The model cannot decode, or `slots` is above its `max_seq`.
        """
        check_width(width)
        model = decoding_model(spec)
        self.spec = spec
        self.config: DecoderConfig = model.config
        self.slots = resolved_slots(self.config, slots)
        self.width = width
        self.bound = BoundPlan(inference_plan(bound.plan), bound.mesh)
        asked = model.cache_spec(seats=1, slots=self.slots, chunk=width)
        self.cache = CacheLayout(self.bound, asked)
        step = functools.partial(decode, spec, self.bound)
        out = (replicated(self.bound), self.cache.shardings)
        self.jitted = jax.jit(step, donate_argnums=1, out_shardings=out)
        self.reading = Reading(spec, model, self.bound, self.cache)

    @property
    def reads(self) -> Reads:
        """What the model reads beside a prompt."""
        return self.reading.reads

    def begin(
        self,
        params: Params,
        source: Sequence[int] = (),
        frames: Any = None,
        images: Any = None,
    ) -> Cache:
        """The cache of a sequence before its first token, its source read.

        Args:
            params: Laid out by `bound`.
            source: What the model's encoder reads; nothing where it has none.
            frames: Sound in its place, `[frames, mels]`.
            images: What is seen among the tokens, `[images, height, width, channels]`.

        Cost: with any of them the encoder; see `Reading`.
        """
        given = {"source": source, "frames": frames, "images": images}
        return self.reading(params, self.cache.empty(), **given)

    def __call__(
        self, params: Params, cache: Cache, tokens: Chunk, sampling: Sampling
    ) -> tuple[Array, Cache]:
        """The token after the last of these, and the cache with them in it; see `decode`.

        Args:
            params: Laid out by `bound`; kept. Layers in host memory are fetched one after another.
            cache: Of the sequence; given up.
            tokens: `[width]`, host or device arrays.
            sampling: How to choose.

        Raises:
            InputError: There are more or fewer tokens than `width`, which the cache was made for.
        """
        if tokens.ids.shape != (self.width,):
            raise InputError(
                f"decode: found tokens of shape {tuple(tokens.ids.shape)}, and this program takes"
                f" {self.width} a call; fill them up with Chunk.of, or make a program of another"
                " width"
            )
        return self.jitted(params, cache, tokens, sampling)

    def arguments(self, params: Params) -> tuple[Any, ...]:
        """Shapes and shardings of what a call gets.

        Args:
            params: Arrays, or shapes with shardings.
        """
        sharding = replicated(self.bound)
        number = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        return (
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
            ),
            self.cache.abstract,
            Chunk(
                ids=number((self.width,), np.int32),
                start=number((), np.int32),
                count=number((), np.int32),
                source=None if self.reads.longest is None else number((), np.int32),
            ),
            Sampling(temperature=number((), np.float32), seed=number((), np.uint32)),
        )

    def lowered(self, params: Params) -> Any:
        """The program, traced and not compiled; `params` as for `arguments`."""
        return self.jitted.lower(*self.arguments(params))


def decode(
    spec: ModelSpec,
    bound: BoundPlan,
    params: Params,
    cache: Cache,
    tokens: Chunk,
    sampling: Sampling,
) -> tuple[Int[Array, ""], Cache]:
    """Put tokens (the rest is padding) at positions from `start` on, and choose the next; pure.

    No more of them at once than the `chunk` that the cache was made for.

    Returns:
        The token after the last of them, and the cache with them in it.
    """
    start, count = tokens.start, tokens.count
    offset = jnp.arange(tokens.ids.shape[0], dtype=jnp.int32)
    valid = offset < count
    position = jnp.where(valid, start + offset, 0)
    read = None if tokens.source is None else jnp.broadcast_to(tokens.source, position.shape)
    seat = jnp.where(valid, 0, -1)
    flat = FlatTokens(seat=seat, position=position, slot=position, source=read)
    with use(bound):
        model = spec.merge(params)
        hidden, cache = model.decode(tokens.ids, cache, flat)
        logits = model.logits(hidden[count - 1][None])[0].astype(jnp.float32)
    key = jax.random.fold_in(jax.random.key(sampling.seed), start + count)
    return sample(logits, sampling.temperature, key), cache


def sample(logits: Float[Array, " v"], temperature: Float[Array, ""], key: Array) -> Int[Array, ""]:
    """A token drawn from `softmax(logits / temperature)`; the likeliest at temperature 0."""
    divisor = jnp.where(temperature > 0, temperature, 1.0)
    drawn = jax.random.categorical(key, logits / divisor)
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32)


def check_width(width: int) -> None:
    """Refuse calls of no tokens."""
    if width < 1:
        raise InputError(f"tokens_per_step: found {width}; give 1 or more")


def decoding_model(spec: ModelSpec) -> Any:
    """The model without its arrays.

    Raises:
        InputError: It cannot decode.
    """
    model = spec.merge(shapes_of(spec))
    missing = next((name for name in _NEEDED if not hasattr(model, name)), None)
    if missing is not None:
        raise InputError(
            f"model: {type(model).__name__} has no '{missing}', which generation needs;"
            f" give it {', '.join(_NEEDED)} as colossax.nn.Decoder has them"
        )
    return model


def resolved_slots(config: DecoderConfig, slots: int | None) -> int:
    """Slots of a sequence; default the model's longest.

    Raises:
        InputError: They are more than that.
    """
    if slots is None:
        return config.max_seq
    if not 1 < slots <= config.max_seq:
        raise InputError(
            f"slots: found {slots}, but the model's longest sequence is {config.max_seq};"
            f" give 2 to {config.max_seq}"
        )
    return slots
