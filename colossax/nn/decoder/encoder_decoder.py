"""A transformer of two stacks: an encoder of a source, and a decoder that reads what it made."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from colossax.errors import InputError
from colossax.nn.attention import FlatTokens
from colossax.nn.block import block_input
from colossax.nn.cache import CacheSpec
from colossax.nn.config import DecoderConfig
from colossax.nn.config.pair import check_pair
from colossax.nn.decoder.cross import Source
from colossax.nn.decoder.frames import Frames
from colossax.nn.decoder.trunk import Rows, Trunk
from colossax.nn.decoder.vocabulary import Vocabulary, head_input, make_embedding, make_head
from colossax.nn.stack.stack import LayerStack
from colossax.pallas.attention import Mask


class EncoderDecoder(Vocabulary):
    """One table of tokens for both stacks, and a head: a `LanguageModel` of pairs of texts.

    With `encoder.frames` a source is sound, and the table is the decoder's alone. Layers of the
    encoder are numbered before those of the decoder, in plans and cuts.
    """

    def __init__(self, encoder: DecoderConfig, decoder: DecoderConfig, *, rngs: nnx.Rngs):
        """Build it.

        Args:
            encoder: Not causal; of its ends only `embed_scale` counts.
            decoder: With `longest_source`; its ends are the model's.
            rngs: Keys of the parameters.

        Raises:
            InputError: They do not fit together.
        """
        check_pair(encoder, decoder)
        self.config, self.source_config = decoder, encoder
        self.embed = make_embedding(decoder, rngs)
        self.frames = None if encoder.frames is None else Frames(encoder, encoder.frames, rngs=rngs)
        self.encoder = Trunk(encoder, rngs=rngs)
        self.decoder = Trunk(decoder, rngs=rngs)
        self.head, self.head_bias = make_head(decoder, rngs)

    def __call__(
        self,
        tokens: Int[Array, "b s"],
        *,
        source: Int[Array, "b t"] | None = None,
        frames: Num[Array, "b f m"] | None = None,
        segments: Int[Array, "b s"] | None = None,
        source_segments: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b s v"]:
        """Logits of every token of the decoder."""
        given = {"source": source, "frames": frames, "source_segments": source_segments}
        return self.logits(self.hidden(tokens, segments=segments, **given)[0])

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """Its layer stacks by name, in the order in which they run."""
        return {"encoder/layers": self.encoder.layers, "decoder/layers": self.decoder.layers}

    @property
    def draws(self) -> bool:
        """See `Trunk.draws`."""
        return self.encoder.draws or self.decoder.draws

    def hidden(
        self,
        tokens: Int[Array, "b s"] | None = None,
        *,
        source: Int[Array, "b t"] | None = None,
        frames: Num[Array, "b f m"] | None = None,
        source_segments: Int[Array, "b t"] | None = None,
        embeddings: Float[Array, "b s d"] | None = None,
        positions: Int[Array, "b s"] | None = None,
        segments: Int[Array, "b s"] | None = None,
        mask: Mask | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "b s d"], dict[str, Any]]:
        """Final hidden states of the decoder, normed, in the compute dtype; and its layers' sums.

        Args:
            tokens: Of the decoder, or give `embeddings`.
            source: Tokens that the encoder reads.
            frames: Of sound, in their place, to models of `frames`.
            source_segments: Documents of the source; negative is padding. Tokens of a document see
                those of its number alone, in both rows.
            embeddings: In place of tokens.
            positions: Of the decoder's tokens.
            segments: Documents of those, numbered as their sources are.
            mask: Who sees whom among them; default causal.
            key: For dropout: one, or one for each row, `[b]`; None: without.

        Raises:
            InputError: A row is longer than the model's, the source is missing or of another kind,
                or both inputs are given.
        """
        if (tokens is None) == (embeddings is None):
            raise InputError("hidden: give either tokens or embeddings, one of them")
        x: Any = self.embedded(tokens) if tokens is not None else embeddings
        rows = Rows(
            tokens=tokens,
            positions=positions,
            segments=segments,
            mask=mask,
            key=key,
            source=self.encoded(source, source_segments, frames, key=_of_source(key)),
            source_segments=source_segments,
        )
        stack = self.decoder
        out = stack.layers(*stack.enter(x, rows))
        return head_input(stack.leave(out.carry)), out.sums

    def encoded(
        self,
        source: Int[Array, "b t"] | None = None,
        segments: Int[Array, "b t"] | None = None,
        frames: Num[Array, "b f m"] | None = None,
        *,
        key: Array | None = None,
    ) -> Float[Array, "b t d"]:
        """What the encoder makes of a source, as layers of the decoder read it.

        Args:
            source: Tokens.
            segments: Documents of the rows; negative is padding.
            frames: Of sound, in place of tokens; each two are one.
            key: For dropout, as of `hidden`.

        Raises:
            InputError: It is given none, or what it does not read.
        """
        x = self._entering(source, frames)
        rows, stack = Rows(tokens=source, segments=segments, key=key), self.encoder
        return block_input(stack.leave(stack.layers(*stack.enter(x, rows)).carry))

    def read(
        self,
        source: Int[Array, "b t"] | None,
        count: Int[Array, " b"],
        cache: dict[str, Any],
        seat: Int[Array, " b"],
        frames: Num[Array, "b f m"] | None = None,
    ) -> dict[str, Any]:
        """The cache with what decoders of these sources attend to, before their first token.

        Args:
            source: Tokens, filled up behind `count` of each row.
            count: Of real ones.
            cache: Made as `cache_spec` says.
            seat: Row of the cache for each source.
            frames: Of sound, in place of tokens, with nothing behind them: `count` is half of them.

        Cost: the encoder, keys and values of the source in each layer of the decoder, and those
        layers for one token that is none.
        """
        segments = None
        if source is not None:
            segments = jnp.where(jnp.arange(source.shape[1]) < count[:, None], 0, -1)
        none, zero = jnp.full((1,), -1, jnp.int32), jnp.zeros((1,), jnp.int32)
        flat = FlatTokens(seat=none, position=zero, slot=none, source=zero)
        given = Source(hidden=self.encoded(source, segments, frames), seat=seat)
        entering = self.decoder.enter_flat(self.embedded(zero[None]), zero, flat, given)
        return self.decoder.layers(*entering, carried=cache).carried

    def decode(
        self, tokens: Int[Array, " t"], cache: dict[str, Any], flat: FlatTokens
    ) -> tuple[Float[Array, "t d"], dict[str, Any]]:
        """See `Decoder.decode`; sources were read before."""
        stack = self.decoder
        entering = stack.enter_flat(self.embedded(tokens[None]), tokens, flat)
        out = stack.layers(*entering, carried=cache)
        return head_input(stack.leave(out.carry))[0], out.carried

    def cache_spec(
        self, *, seats: int, slots: int, chunk: int | None = None
    ) -> CacheSpec | dict[str, CacheSpec]:
        """See `Decoder.cache_spec`; beside it keys and values of a source of each seat."""
        return self.decoder.layers.cache_spec(seats=seats, slots=slots, chunk=chunk)

    def _entering(self, source: Any, frames: Any) -> Any:
        """Embeddings of what the encoder reads."""
        name, other = ("source", "frames") if self.frames is None else ("frames", "source")
        given = {"source": source, "frames": frames}
        if given[name] is None or given[other] is not None:
            found = "none is given" if given[other] is None else f"{other} is given"
            raise InputError(
                f"hidden: an encoder reads a source, and {found}; give {name}, in a batch as an"
                " array of that name"
            )
        if self.frames is not None:
            return self.frames(frames)
        return self.embedded(source, self.source_config)


def _of_source(key: Array | None) -> Array | None:
    """Another key, or keys, than those of the decoder's layers, which have the same numbers."""
    if key is None:
        return None
    return jax.random.fold_in(key, 1) if key.ndim == 0 else jax.vmap(_of_source)(key)
