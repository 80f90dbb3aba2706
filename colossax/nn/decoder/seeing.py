"""A decoder of text whose tokens may be what an encoder made of an image's patches."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from colossax.errors import InputError
from colossax.nn.attention import FlatTokens
from colossax.nn.block import ACTIVATIONS
from colossax.nn.cache import CacheArray, CacheSpec
from colossax.nn.config import DecoderConfig
from colossax.nn.config.seeing import ProjectorConfig, check_seeing
from colossax.nn.decoder.decoder import Decoder
from colossax.nn.layers import LayerNorm, Linear
from colossax.nn.stack.stack import LayerStack
from colossax.pallas.attention import Mask
from colossax.sharding import constrain, current_order, whole_rows

_TEXT, _IMAGES = "text", "images"
"""Kinds of what is cached."""


class Projector(nnx.Module):
    """`act(x @ w1 + b1) @ w2 + b2`, from the width of images to that of text.

    `x` is what is given, normed where the configuration says, of squares of patches side by side.
    """

    def __init__(
        self, image: DecoderConfig, embed: int, projector: ProjectorConfig, *, rngs: nnx.Rngs
    ):
        assert image.patches is not None
        self.config, self.patches = projector, image.patches
        how: dict[str, Any] = {"rngs": rngs, "bias": projector.bias, "std": image.init_std}
        wide, between = image.embed * projector.merge**2, projector.width or embed
        eps = projector.norm_eps
        self.norm = None if eps is None else LayerNorm(image.embed, eps=eps)
        self.up = Linear((wide, between), ("embed", "mlp"), **how)
        self.down = Linear((between, embed), ("mlp", "embed"), **how)

    def __call__(self, x: Float[Array, "b s w"], grid: tuple[int, int]) -> Float[Array, "b k d"]:
        if self.patches.class_token and not self.config.class_token:
            x = x[:, 1:]
        x = x if self.norm is None else self.norm(x)
        x = self.up(self._merged(x, *grid))
        return self.down(ACTIVATIONS[self.config.activation](x))

    def _merged(self, x: Float[Array, "b s w"], rows: int, columns: int) -> Float[Array, "b k v"]:
        """States of each square of patches side by side, row by row."""
        side = self.config.merge
        if side == 1:
            return x
        x = x.reshape(x.shape[0], rows, side, columns, side, x.shape[-1])
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape[0], rows * columns, -1)


class SeeingDecoder(nnx.Module):
    """A `LanguageModel` that reads images among its tokens, in front of them or between.

    A token id at or above the vocabulary is no word but a place of the row's images: `vocab + k` is
    the k-th state that they give, image after image, patch after patch. So rows may be packed, cut
    and shared by devices like those of any tokens. No logit stands for a place, and a loss has to
    leave out the tokens before one. Where positions have several axes, places of an image stand
    together, in their order.

    Layers of the encoder of images are numbered before those of the decoder, in plans and cuts.

    Source: Liu et al. 2023, Visual Instruction Tuning (LLaVA).
    """

    def __init__(
        self,
        text: DecoderConfig,
        image: DecoderConfig,
        projector: ProjectorConfig,
        *,
        rngs: nnx.Rngs,
    ):
        """Build it.

        Args:
            text: The decoder; its vocabulary and head are the model's.
            image: The encoder, as deep as its states are taken, without a norm behind them.
            projector: What makes tokens of those.
            rngs: Keys of the parameters.

        Raises:
            InputError: They do not fit together.
        """
        check_seeing(text, image, projector)
        assert image.patches is not None
        self.config, self.image_config = text, image
        self.image = Decoder(image, rngs=rngs)
        self.projector = Projector(image, text.embed, projector, rngs=rngs)
        self.text = Decoder(text, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "b s"],
        *,
        pixels: Num[Array, "b ..."] | None = None,
        positions: Int[Array, "b s"] | None = None,
        segments: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b s v"]:
        """Logits of every token."""
        rows = {"pixels": pixels, "positions": positions, "segments": segments}
        return self.logits(self.hidden(tokens, **rows)[0])

    @property
    def embed(self) -> Any:
        """The table of words."""
        return self.text.embed

    @property
    def places(self) -> int | None:
        """Tokens that an image takes; None where that depends on its size."""
        patches = self.projector.patches
        return None if patches.any_size else self.projector.config.tokens(patches)

    @property
    def square(self) -> tuple[int, int]:
        """Height and width, in pixels, of what becomes a token."""
        patches, side = self.projector.patches, self.projector.config.merge
        return side * patches.patch_height, side * patches.patch_width

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """Its layer stacks by name, in the order in which they run."""
        return {"image/layers": self.image.layers, "text/layers": self.text.layers}

    @property
    def auxiliary(self) -> dict[str, float]:
        """See `Decoder`."""
        return self.text.auxiliary

    @property
    def draws(self) -> bool:
        """See `Decoder`."""
        return self.text.draws

    @property
    def readout(self) -> dict[str, Any]:
        """See `Vocabulary`."""
        return self.text.readout

    def head_weight(self) -> Float[Array, "d v"]:
        """See `Vocabulary`."""
        return self.text.head_weight()

    def logits(self, hidden: Float[Array, "*lead d"]) -> Float[Array, "*lead v"]:
        """See `Vocabulary`."""
        return self.text.logits(hidden)

    def hidden(
        self,
        tokens: Int[Array, "b s"] | None = None,
        *,
        pixels: Num[Array, "b ..."] | None = None,
        embeddings: Float[Array, "b s d"] | None = None,
        positions: Int[Array, "b s"] | None = None,
        segments: Int[Array, "b s"] | None = None,
        mask: Mask | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "b s d"], dict[str, Any]]:
        """Final hidden states, normed, in the compute dtype, and the sums of the decoder's layers.

        Args:
            tokens: Ids and places; or give `embeddings`.
            pixels: Images of each row, as many of each, `[rows, images, height, width, channels]`;
                those that no place names are computed for nothing. None: there are none, and a
                place is an error that is not seen.
            embeddings, positions, segments, mask, key: See `Decoder.hidden`.

        Raises:
            InputError: As `Decoder.hidden`; images are given beside embeddings, or of another size.
        """
        rows = {"positions": positions, "segments": segments, "mask": mask, "key": key}
        if pixels is None:
            return self.text.hidden(tokens, embeddings=embeddings, **rows)
        if tokens is None:
            raise InputError(
                "hidden: images stand where tokens name them, and embeddings are given; give tokens"
            )
        embeddings = self._placed(tokens, self.seen(pixels))
        points = None
        if self._has_axes:
            points = self._points(tokens, positions, self._grid(pixels))
        return self.text.hidden(embeddings=embeddings, points=points, **rows)

    def seen(self, pixels: Num[Array, "b ..."]) -> Float[Array, "b k d"]:
        """What the row's images give, in their order: embeddings for `k = n places` places.

        Cost: the encoder of images. Devices that share rows have an image each where those divide
        them, else all compute the same ones; what images give is gathered by them.

        Raises:
            InputError: Images are of another size than the model's, or lie in no rows.
        """
        if pixels.ndim != 5:
            raise InputError(
                f"batch 'pixels': found shape {list(pixels.shape)}; give the images of each row,"
                " [rows, images, height, width, channels]"
            )
        rows, count = pixels.shape[:2]
        images = pixels.reshape(rows * count, *pixels.shape[2:])
        with whole_rows(rows * count):
            states = self.projector(self.image.hidden(pixels=images)[0], self._grid(pixels))
        return constrain(states.reshape(rows, -1, states.shape[-1]), "batch", None, None)

    def decode(
        self, tokens: Int[Array, " t"], cache: dict[str, Any], flat: FlatTokens
    ) -> tuple[Float[Array, "t d"], dict[str, Any]]:
        """See `Decoder.decode`; images were looked at before."""
        cache = dict(cache)
        seen, points = cache.pop(_IMAGES), None
        states = seen["states"][flat.seat, jnp.maximum(tokens - self.config.vocab, 0)]
        x = self._chosen(tokens, self.text.embedded(self._words(tokens)[None]), states[None])
        if self._has_axes:
            before, count = self._counted(tokens, seen["count"], flat)
            seen = {**seen, "count": count}
            rows, columns = seen["grid"][flat.seat].T
            grid = jnp.maximum(rows, 1)[None], jnp.maximum(columns, 1)[None]
            points = self._points_after(tokens[None], flat.position[None], before[None], grid)
        kept = self._of_text(cache)
        hidden, kept = self.text.decode_embedded(x, tokens, kept, flat, points=points)
        return hidden, {**self._named(kept), _IMAGES: seen}

    def look(
        self,
        pixels: Num[Array, "b ..."],
        cache: dict[str, Any],
        seat: Int[Array, " b"],
        first: int | Int[Array, ""] = 0,
    ) -> dict[str, Any]:
        """The cache with what images give, before the first token that names them.

        Args:
            pixels: Of each sequence.
            cache: Made as `cache_spec` says.
            seat: Row of the cache for each sequence.
            first: Their first place, behind those of images that were looked at before.

        Raises:
            InputError: They give more states than a sequence has slots.
        """
        states, held = self.seen(pixels), cache[_IMAGES]["states"]
        if states.shape[1] > held.shape[1]:
            raise InputError(
                f"images: {pixels.shape[1]} of them take {states.shape[1]} tokens, above the"
                f" {held.shape[1]} of a sequence; give fewer, or more slots"
            )
        at = first + jnp.arange(states.shape[1], dtype=jnp.int32)
        held = held.at[seat[:, None], at].set(states.astype(held.dtype), mode="drop")
        told = {**cache[_IMAGES], "states": held}
        if self._has_axes:
            told["grid"] = told["grid"].at[seat].set(jnp.asarray(self._grid(pixels), jnp.int32))
        return {**cache, _IMAGES: told}

    def cache_spec(
        self, *, seats: int, slots: int, chunk: int | None = None
    ) -> dict[str, CacheSpec]:
        """See `Decoder.cache_spec`; beside it a state for each place that a sequence can have."""
        own = self.text.cache_spec(seats=seats, slots=slots, chunk=chunk)
        shape = (seats, slots, self.config.embed)
        arrays = {"states": CacheArray(shape=shape, dims=(None, None, None), role="compute")}
        if self._has_axes:  # places that have been read, and tokens of an image along its sides
            arrays["count"] = CacheArray(shape=(seats,), dims=(None,), dtype="int32")
            arrays["grid"] = CacheArray(shape=(seats, 2), dims=(None, None), dtype="int32")
        seen = CacheSpec(arrays=arrays, kind="sequence")
        return {**self._named(own), _IMAGES: seen}

    def _words(self, tokens: Array) -> Array:
        """Ids of words; a place is the first one."""
        return jnp.where(tokens < self.config.vocab, tokens, 0)

    def _chosen(self, tokens: Array, words: Array, seen: Array) -> Array:
        """Of each token the one or the other."""
        return jnp.where((tokens >= self.config.vocab)[..., None], seen.astype(words.dtype), words)

    def _placed(self, tokens: Array, seen: Float[Array, "b k d"]) -> Float[Array, "b s d"]:
        """Embeddings of words, and in their places of what images give."""
        at = jnp.clip(tokens - self.config.vocab, 0, seen.shape[1] - 1)
        states = jnp.take_along_axis(seen, at[..., None], axis=1)
        states = constrain(states, "batch", "seq", "embed")
        return self._chosen(tokens, self.text.embedded(self._words(tokens)), states)

    @property
    def _has_axes(self) -> bool:
        rope = self.config.rope
        return rope is not None and rope.sections is not None

    def _grid(self, pixels: Array) -> tuple[int, int]:
        """Tokens of an image from top to bottom, and from left to right."""
        sized = self.projector.patches.of(*pixels.shape[2:4])
        return self.projector.config.grid(sized)

    def _points(
        self, tokens: Array, positions: Array | None, grid: tuple[int, int]
    ) -> Int[Array, "b s 3"]:
        """Time, row and column of each token of whole rows, however they lie.

        Cost: tokens' ids are gathered over devices that share a row.
        """
        order = current_order().indices(tokens.shape[1])
        natural = jnp.broadcast_to(order, tokens.shape)
        positions = natural if positions is None else positions
        is_place = (tokens >= self.config.vocab).astype(jnp.int32)[:, np.argsort(order)]
        before = jnp.cumsum(is_place, axis=1) - is_place
        at_start = jnp.take_along_axis(before, natural - positions, axis=1)
        return self._points_after(tokens, positions, before[:, order] - at_start, grid)

    def _points_after(
        self, tokens: Array, positions: Array, before: Array, grid: tuple[Any, Any]
    ) -> Int[Array, "b s 3"]:
        """Likewise, of tokens that so many places of their document stand before.

        An image takes as many positions as its longer side has tokens: words go on behind it.
        """
        rows, columns = grid
        is_place, places = tokens >= self.config.vocab, rows * columns
        at = jnp.where(is_place, (tokens - self.config.vocab) % places, 0)
        images = (before - at) // places
        start = positions - at - images * (places - jnp.maximum(rows, columns))
        return jnp.stack([start, start + at // columns, start + at % columns], axis=-1)

    def _counted(self, tokens: Array, count: Array, flat: FlatTokens) -> tuple[Array, Array]:
        """Places before each flat token in its sequence, and those that each has then had."""
        is_place = (tokens >= self.config.vocab) & (flat.seat >= 0)
        same = flat.seat[:, None] == flat.seat[None, :]
        earlier = flat.position[None, :] < flat.position[:, None]
        here = jnp.sum(same & earlier & is_place[None, :], axis=1)
        begins = (flat.position == 0) & (flat.seat >= 0)
        begun = jnp.where(begins, flat.seat, len(count))
        count = count.at[begun].set(0, mode="drop")  # the seat may have been another's
        return count[flat.seat] + here, count.at[flat.seat].add(is_place.astype(jnp.int32))

    @staticmethod
    def _named(own: Any) -> dict[str, Any]:
        """What layers of one kind keep, by a name as those of several have."""
        several = isinstance(own, Mapping) and all(
            isinstance(one, Mapping | CacheSpec) for one in own.values()
        )
        return dict(own) if several else {_TEXT: own}

    @staticmethod
    def _of_text(cache: dict[str, Any]) -> Any:
        return cache.get(_TEXT, cache)
