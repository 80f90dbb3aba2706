"""A transformer of one stack, decoder or encoder, from parts; the model families choose those."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from colossax.errors import InputError
from colossax.nn.attention import FlatTokens
from colossax.nn.cache import CacheSpec
from colossax.nn.config import DecoderConfig
from colossax.nn.config.drafter import check_target
from colossax.nn.decoder.head import Head, Transform, check_vocabulary
from colossax.nn.decoder.layers import Layers
from colossax.nn.decoder.patches import Patches
from colossax.nn.decoder.trunk import Rows, Trunk
from colossax.nn.decoder.vocabulary import Vocabulary, head_input, make_embedding, make_head
from colossax.nn.layers import Linear
from colossax.nn.stack.stack import LayerStack
from colossax.nn.stack.taps import taps_of, with_taps
from colossax.pallas.attention import Mask
from colossax.sharding import compute_dtype, constrain, current_order


class Decoder(Trunk, Vocabulary):
    """Token embedding, a stack of layers, a norm and a head: a `LanguageModel`.

    With `config.causal` off it is an encoder, which generates no text; with `config.head` it tells
    something else than logits of its vocabulary, see `told`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, layers: Layers | None = None):
        """Build it.

        Args:
            config: Sizes, and the parts where none are given.
            rngs: Keys of the parameters.
            layers: In place of `decoder_layers(config)`: `Block`s of other sublayers or wiring, or
                of several kinds.

        Raises:
            InputError: It reads sound.
        """
        if config.frames is not None:
            raise InputError(
                "model.frames: it is the encoder of an encoder-decoder that reads frames of sound;"
                " give nn.EncoderDecoder(encoder, decoder), or leave them out"
            )
        self.embed = make_embedding(config, rngs)
        self.patches = (
            None if config.patches is None else Patches(config, config.patches, rngs=rngs)
        )
        super().__init__(config, rngs=rngs, layers=layers)
        self.head, self.head_bias = make_head(config, rngs)
        self.transform = (
            None if config.transform is None else Transform(config, config.transform, rngs=rngs)
        )
        self.answers = None if config.head is None else Head(config, config.head, rngs=rngs)
        self.into, self.out_of = _projections(config, rngs)

    def __call__(
        self,
        tokens: Int[Array, "b s"] | None = None,
        *,
        pixels: Num[Array, "b h w c"] | None = None,
        positions: Int[Array, "b s"] | None = None,
        segments: Int[Array, "b s"] | None = None,
        token_types: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b n v"]:
        """Logits of every token; or what its head tells in their place, of a row's document 0."""
        hidden, _ = self.hidden(
            tokens,
            pixels=pixels,
            positions=positions,
            segments=segments,
            token_types=token_types,
        )
        return self.logits(hidden) if self.answers is None else self.told(hidden, segments=segments)

    @property
    def auxiliary(self) -> dict[str, float]:
        """Which of the layers' counts are terms of a loss, sums over tokens, with coefficients."""
        mixture = self.config.mixture
        if mixture is None:
            return {}
        terms = {"router_z_loss": mixture.z_loss}
        if mixture.balance != "none":
            terms["balance_loss"] = mixture.balance_loss
        return {name: coefficient for name, coefficient in terms.items() if coefficient}

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """Its layer stacks by name, in the order in which they run."""
        return {"layers": self.layers}

    def hidden(
        self,
        tokens: Int[Array, "b s"] | None = None,
        *,
        embeddings: Float[Array, "b s d"] | None = None,
        pixels: Num[Array, "b h w c"] | None = None,
        positions: Int[Array, "b s"] | None = None,
        points: Int[Array, "b s axes"] | None = None,
        segments: Int[Array, "b s"] | None = None,
        token_types: Int[Array, "b s"] | None = None,
        mask: Mask | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "b s d"], dict[str, Any]]:
        """Final hidden states, normed, in the compute dtype, and the sums of the layers.

        Args:
            tokens: Token ids; or give `embeddings` or `pixels`.
            embeddings: Token embeddings in place of tokens.
            pixels: Images, to models of `patches`: a token of the class, then of each patch.
            positions: Per token, for rope and learned positions; default 0, 1, ... per row. Who
                sees whom goes by the order in the row, so they ascend by one within a segment.
            points: Positions of several axes, for a rotary embedding that has as many; default
                `positions` on all of them, of an image its grid.
            segments: Documents packed into a row, numbered in their order there; a token sees its
                own. Negative is padding.
            token_types: Kind of each token, for models that have a table of them; default 0.
            mask: Who sees whom; default as the configuration says. Of a mask without segments
                those given are taken.
            key: For gates that draw and for dropout: one, or one for each row, `[b]`; None: neither
                has noise.

        Returns:
            Hidden states `[b, s, d]`, and by name what the layers counted, `[layers, ...]`.

        Raises:
            InputError: The sequence is longer than the model's, several inputs are given or one
                that it does not read, or kinds of tokens to a model that knows none.
        """
        x = self._entering(tokens, embeddings, pixels)
        if pixels is not None and self.config.rope is not None:
            points = self._grid(pixels)
        rows = Rows(
            tokens=tokens,
            positions=positions,
            points=points,
            segments=segments,
            token_types=token_types,
            mask=mask,
            key=key,
        )
        out = self.layers(*self.enter(self._as_wide(x), rows))
        return self._last(out.carry), out.sums

    def hidden_and_keys(
        self,
        tokens: Int[Array, "b s"],
        *,
        positions: Int[Array, "b s"] | None = None,
        segments: Int[Array, "b s"] | None = None,
    ) -> tuple[Float[Array, "b s d"], dict[str, Float[Array, "b s k h"]]]:
        """Final hidden states, and keys `k` and values `v` of the last layer, as a cache has them.

        Args:
            tokens, positions, segments: As of `hidden`.

        Raises:
            InputError: The last layer keeps no keys and values of all tokens.

        Cost: as `hidden`, and a layer's keys and values that travel through all layers.
        """
        check_target(self.config)
        config, rows = self.config, Rows(tokens=tokens, positions=positions, segments=segments)
        x, side = self.enter(self._as_wide(self.embedded(tokens)), rows)
        zeros = jnp.zeros((*x.shape[:2], config.kv_heads, config.head_dim), x.dtype)
        zeros = constrain(zeros, "batch:inner", "seq", "kv_heads", "head_dim")
        order = self.layers.order
        out = self.layers(x, side, carried=with_taps(order, {"k": zeros, "v": zeros}))
        return self._last(out.carry), taps_of(order, out.carried)

    def told(
        self, hidden: Float[Array, "b s d"], *, segments: Any = None, documents: int = 1
    ) -> Float[Array, "b n o"]:
        """What the configuration's head tells, in float32, of every token or document.

        Args:
            hidden: Final hidden states of whole rows.
            segments: Documents of the rows; None: each is one.
            documents: How many of a row are asked for, where the head pools.

        Raises:
            InputError: The model tells logits of its vocabulary.
        """
        if self.answers is None:
            raise InputError(
                "model.head: the model has none but that of its vocabulary; give head, as"
                " HeadConfig(outputs=2, pool='first')"
            )
        return self.answers(hidden, segments, documents)

    def decode(
        self, tokens: Int[Array, " t"], cache: dict[str, Any], flat: FlatTokens
    ) -> tuple[Float[Array, "t d"], dict[str, Any]]:
        """Final hidden states of flat tokens of any sequences, and the cache with them in it.

        Prompt chunks and single next tokens look alike: each token says where it belongs.
        """
        return self.decode_embedded(self.embedded(tokens[None]), tokens, cache, flat)

    def decode_embedded(
        self,
        x: Float[Array, "1 t d"],
        tokens: Int[Array, " t"],
        cache: Any,
        flat: FlatTokens,
        points: Int[Array, "1 t axes"] | None = None,
    ) -> tuple[Float[Array, "t d"], Any]:
        """`decode` of embeddings, which tokens or something else were made."""
        self._check_generates()
        entering = self.enter_flat(self._as_wide(x), tokens, flat, points=points)
        out = self.layers(*entering, carried=cache)
        return self._last(out.carry)[0], out.carried

    def cache_spec(
        self, *, seats: int, slots: int, chunk: int | None = None
    ) -> CacheSpec | dict[str, CacheSpec]:
        """Cache for `seats` sequences of up to `slots` tokens; see `LayerStack.cache_spec`.

        With `chunk`, the most tokens of a sequence that a call of `decode` will have, layers with
        a window keep as many slots as that takes.

        Raises:
            InputError: Attention is not causal.
        """
        self._check_generates()
        return self.layers.cache_spec(seats=seats, slots=slots, chunk=chunk)

    def _entering(self, tokens: Any, embeddings: Any, pixels: Any) -> Any:
        """Embeddings of whichever is given."""
        if sum(x is not None for x in (tokens, embeddings, pixels)) != 1:
            raise InputError("hidden: give either tokens or embeddings or pixels, one of them")
        if pixels is None:
            return embeddings if tokens is None else self.embedded(tokens)
        if self.patches is None:
            raise InputError(
                "hidden: the model reads tokens, and pixels are given; give tokens, or a model of"
                " patches, as ViTConfig describes"
            )
        return self.patches(pixels)

    def _grid(self, pixels: Array) -> Int[Array, "b s 2"]:
        """Row and column of each patch."""
        assert self.config.patches is not None
        rows, columns = self.config.patches.of(*pixels.shape[1:3]).grid
        points = jnp.stack(jnp.divmod(current_order().indices(rows * columns), columns), axis=-1)
        return jnp.broadcast_to(points, (pixels.shape[0], *points.shape))

    def _as_wide(self, x: Any) -> Any:
        """Embeddings in the compute dtype, as wide as the layers."""
        x = x.astype(compute_dtype(x.dtype))
        return x if self.into is None else self.into(x)

    def _last(self, carry: Any) -> Any:
        """Hidden states as the head reads them."""
        hidden = self.leave(carry)
        if self.transform is not None:
            hidden = self.transform(hidden)
        return head_input(hidden if self.out_of is None else self.out_of(hidden))

    def _check_generates(self) -> None:
        check_vocabulary(self.config)
        if not self.config.causal:
            raise InputError(
                "model: its attention is not causal, so it generates no text; give a decoder"
            )


def _projections(config: DecoderConfig, rngs: nnx.Rngs) -> tuple[Linear | None, Linear | None]:
    """Maps from the tokens' width to that of the layers and back, where they differ."""
    width = config.token_width
    if width is None:
        return None, None
    dims = ("width", "embed"), ("embed", "width")
    shapes = (width, config.embed), (config.embed, width)
    into, out_of = (
        Linear(shape, dim, rngs=rngs, std=config.init_std)
        for shape, dim in zip(shapes, dims, strict=True)
    )
    return into, out_of
