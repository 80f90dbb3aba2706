"""What a model reads before a sequence's first token, into the cache: sources, sound, images."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Num

from colossax.config import BoundPlan
from colossax.inference.cache import Cache, CacheLayout
from colossax.nn import ModelSpec
from colossax.nn.config.frames import FRAMES_PER_TOKEN
from colossax.scheduling import Heard, Reads, Seen
from colossax.sharding import replicated, use
from colossax.typing import Params

LEAST_SOURCE = 32
"""Tokens of the shortest source that a program is compiled for."""


class Reading:
    """The programs that write what a model reads into a seat's rows of the cache.

    Cost: the encoder, and for a source keys and values of it in each layer of the decoder; the
    cache is donated. A compilation for each power of two of a source's length from `LEAST_SOURCE`
    on, for each length of sound, and for each size of images, which are looked at one by one.
    """

    def __init__(self, spec: ModelSpec, model: Any, bound: BoundPlan, cache: CacheLayout):
        """Compile nothing yet.

        Args:
            spec, bound: The model and where its parameters live, as of generation.
            model: Without its arrays.
            cache: That it writes into.
        """
        self.reads = reads_of(model)
        self._bound, self._cache = bound, cache
        how: dict[str, Any] = {"donate_argnums": 1, "out_shardings": cache.shardings}
        self._read = jax.jit(functools.partial(read, spec, bound), **how)
        self._look = jax.jit(functools.partial(look, spec, bound), **how)

    def __call__(
        self,
        params: Params,
        cache: Cache,
        seat: int = 0,
        *,
        source: Sequence[int] = (),
        frames: Any = None,
        images: Any = None,
    ) -> Cache:
        """The cache with what a sequence reads; as it was where that is nothing.

        Args:
            params: Laid out by `bound`.
            cache: Given up.
            seat: Row of the sequence.
            source: What the model's encoder reads.
            frames: Sound in its place, `[frames, mels]`.
            images: What is seen among the tokens, `[images, height, width, channels]`.
        """
        row = np.full(1, seat, np.int32)
        if images is not None:
            assert self.reads.sight is not None
            places = self.reads.sight.places_of(*images.shape[1:3])
            for i, image in enumerate(images):
                first = np.int32(i * places)
                cache = self._look(params, cache, row, first, np.asarray(image)[None, None])
        elif frames is not None:
            count = np.int32(len(frames) // FRAMES_PER_TOKEN)
            cache = self._read(params, cache, row, None, count, np.asarray(frames)[None])
        elif source:
            ids = np.zeros((1, self.width(len(source))), np.int32)
            ids[0, : len(source)] = source
            cache = self._read(params, cache, row, ids, np.int32(len(source)), None)
        return cache

    def width(self, tokens: int) -> int:
        """Of the program that reads a source of so many tokens."""
        assert self.reads.longest is not None
        return min(self.reads.longest, max(LEAST_SOURCE, 1 << (tokens - 1).bit_length()))

    @property
    def cases(self) -> list[dict[str, Any]]:
        """One to read for each program that is known of, the largest last.

        All of sources; of sound the longest; of images those of the model's own size.
        """
        reads = self.reads
        if reads.sight is not None:
            return [{"images": np.zeros((1, *reads.sight.shape), np.float32)}]
        if reads.longest is None:
            return []
        if reads.heard is not None:
            shape = (reads.longest * reads.heard.frames, reads.heard.mels)
            return [{"frames": np.zeros(shape, np.float32)}]
        widths = sorted({self.width(n) for n in range(1, reads.longest + 1)})
        return [{"source": (0,) * width} for width in widths]

    @property
    def compiled(self) -> int:
        """How many programs there are by now."""
        jitted: list[Any] = [self._read, self._look]
        return sum(one._cache_size() for one in jitted)

    def lowered(self, params: Params) -> Any:
        """The largest program that is known of, traced and not compiled; None: nothing is read.

        Args:
            params: Arrays, or shapes with shardings.
        """
        if not self.reads.anything:
            return None
        (case,) = self.cases[-1:]
        given = functools.partial(
            jax.ShapeDtypeStruct, dtype=np.int32, sharding=replicated(self._bound)
        )
        start = params, self._cache.abstract, given((1,))
        if "images" in case:
            return self._look.lower(*start, given(()), case["images"][None])
        source, frames = case.get("source"), case.get("frames")
        ids = None if source is None else given((1, len(source)))
        return self._read.lower(*start, ids, given(()), None if frames is None else frames[None])


def read(
    spec: ModelSpec,
    bound: BoundPlan,
    params: Params,
    cache: Cache,
    seat: Int[Array, " 1"],
    source: Int[Array, "1 t"] | None,
    count: Int[Array, ""],
    frames: Num[Array, "1 f m"] | None = None,
) -> Cache:
    """The cache with what the decoder attends to of a source, padding behind `count`; pure."""
    with use(bound):
        return spec.merge(params).read(source, jnp.reshape(count, (1,)), cache, seat, frames)


def look(
    spec: ModelSpec,
    bound: BoundPlan,
    params: Params,
    cache: Cache,
    seat: Int[Array, " 1"],
    first: Int[Array, ""],
    images: Num[Array, "1 n h w c"],
) -> Cache:
    """The cache with what images give, the places from `first` on among its sequence's; pure."""
    with use(bound):
        return spec.merge(params).look(images, cache, seat, first)


def reads_of(model: Any) -> Reads:
    """What a model reads beside a prompt."""
    longest = getattr(model.config, "longest_source", None)
    return Reads(longest=longest, heard=_heard(model), sight=_sight(model))


def _sight(model: Any) -> Seen | None:
    if not hasattr(model, "look"):
        return None
    patches = model.image_config.patches
    shape = (patches.height, patches.width, patches.channels)
    return Seen(shape=shape, places=model.places, square=model.square)


def _heard(model: Any) -> Heard | None:
    frames = getattr(getattr(model, "source_config", None), "frames", None)
    return None if frames is None else Heard(mels=frames.mels, frames=FRAMES_PER_TOKEN)
