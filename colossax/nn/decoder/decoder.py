"""A transformer of one stack, decoder or encoder, from parts; the model families choose those."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from colossax.errors import InputError
from colossax.nn.attention import Attention, FlatTokens, Side, Sight
from colossax.nn.block import residual
from colossax.nn.cache import CacheSpec
from colossax.nn.config import DecoderConfig
from colossax.nn.decoder.head import Head, Transform, check_vocabulary
from colossax.nn.decoder.layers import Layers, decoder_layers, make_norm
from colossax.nn.decoder.masks import masks_of, whole_rows
from colossax.nn.layers import Embedding, LayerNorm, Linear
from colossax.nn.module import param
from colossax.nn.rope import document_lengths, rope_tables
from colossax.nn.stack.stack import LayerStack, StackOutput
from colossax.pallas.attention import Mask
from colossax.sharding import (
    compute_dtype,
    constrain,
    current_order,
    gather_weight,
)
from colossax.sharding.experts import row_keys


class Decoder(nnx.Module):
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
        """
        self.config = config
        std, width = config.init_std, config.logit_width
        self.embed = Embedding(
            config.vocab, width, rngs=rngs, dim="vocab", std=std, tied=config.tied
        )
        self.positions = (
            Embedding(config.learned_positions, config.embed, rngs=rngs, dim="positions", std=std)
            if config.learned_positions
            else None
        )
        self.token_types = (
            Embedding(config.token_types, config.embed, rngs=rngs, dim="token_types", std=std)
            if config.token_types
            else None
        )
        self.embed_norm = (
            LayerNorm(config.embed, eps=config.norm_eps, bias=config.norm_bias)
            if config.embed_norm
            else None
        )
        layers = decoder_layers(config) if layers is None else layers
        self.layers = LayerStack(layers.make, layers.order, rngs=rngs)
        self.norm = make_norm(config) if config.final_norm else None
        self.head = (
            None
            if config.tied or config.head is not None
            else Linear((width, config.vocab), ("embed", "vocab"), rngs=rngs, std=std)
        )
        self.head_bias = (
            param(jnp.zeros((config.vocab,), jnp.float32), ("vocab",))
            if config.head_bias and config.head is None
            else None
        )
        self.transform = (
            None if config.transform is None else Transform(config, config.transform, rngs=rngs)
        )
        self.answers = None if config.head is None else Head(config, config.head, rngs=rngs)
        self.into, self.out_of = _projections(config, rngs)

    def __call__(
        self,
        tokens: Int[Array, "b s"],
        *,
        positions: Int[Array, "b s"] | None = None,
        segments: Int[Array, "b s"] | None = None,
        token_types: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b n v"]:
        """Logits of every token; or what its head tells in their place, of a row's document 0."""
        hidden, _ = self.hidden(
            tokens, positions=positions, segments=segments, token_types=token_types
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
    def draws(self) -> bool:
        """Whether layers ask for random keys in training: `hidden(..., key=...)`."""
        return self.config.mixture is not None and self.config.mixture.draws

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """Its layer stacks by name, in the order in which they run."""
        return {"layers": self.layers}

    def hidden(
        self,
        tokens: Int[Array, "b s"] | None = None,
        *,
        embeddings: Float[Array, "b s d"] | None = None,
        positions: Int[Array, "b s"] | None = None,
        segments: Int[Array, "b s"] | None = None,
        token_types: Int[Array, "b s"] | None = None,
        mask: Mask | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "b s d"], dict[str, Any]]:
        """Final hidden states, normed, in the compute dtype, and the sums of the layers.

        Args:
            tokens: Token ids; or give `embeddings`.
            embeddings: Token embeddings in place of tokens.
            positions: Per token, for rope and learned positions; default 0, 1, ... per row. Who
                sees whom goes by the order in the row, so they ascend by one within a segment.
            segments: Documents packed into a row, numbered in their order there; a token sees its
                own. Negative is padding.
            token_types: Kind of each token, for models that have a table of them; default 0.
            mask: Who sees whom; default as the configuration says. Of a mask without segments
                those given are taken.
            key: For gates that draw: one, or one for each row, `[b]`; None: without noise.

        Returns:
            Hidden states `[b, s, d]`, and by name what the layers counted, `[layers, ...]`.

        Raises:
            InputError: The sequence is longer than the model's, both inputs are given, or kinds of
                tokens to a model that knows none.
        """
        if (tokens is None) == (embeddings is None):
            raise InputError("hidden: give either tokens or embeddings, one of them")
        x: Any = self._embedded(tokens) if tokens is not None else embeddings
        x = x.astype(compute_dtype(x.dtype))
        self._check_length(x.shape[1] - current_order().padding)
        if positions is None:
            positions = jnp.broadcast_to(current_order().indices(x.shape[1]), x.shape[:2])
        sights = [] if mask is not None else self._sights()
        side = Side(
            masks=masks_of(self.config, mask, sights, segments, positions, x),
            sights=tuple(sights),
            **self._ropes(positions, segments),
            positions=self._asked(positions),
            **self._routed(x, segments, tokens, key),
        )
        hidden, out = self._run(self._typed(x, token_types), positions, side, None)
        return hidden, out.sums

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
        self._check_generates()
        positions = flat.position[None]
        ropes = self._ropes(positions, flat.seat[None])
        side = Side(flat=flat, positions=self._asked(positions), **ropes)
        if self.config.mixture is not None:
            side = dataclasses.replace(side, valid=flat.seat[None] >= 0, token_ids=tokens[None])
        x = self._typed(self._embedded(tokens[None]), None)
        hidden, out = self._run(x, positions, side, cache)
        return hidden[0], out.carried

    def head_weight(self) -> Float[Array, "d v"]:
        """The output matrix in the compute dtype, its vocabulary split as that of logits.

        Its width is unsharded: logits are far larger than hidden states, so those are
        gathered, not these summed up. What the configuration multiplies logits by is in it.

        Raises:
            InputError: The model tells something else.
        """
        check_vocabulary(self.config)
        if self.head is None:
            weight = self.embed.weight.gathered(to=("vocab", None)).T
        else:
            weight = self.head.weight.gathered(to=(None, "vocab"))
        scale = self.config.logit_scale
        return weight if scale == 1 else weight * scale

    @property
    def readout(self) -> dict[str, Any]:
        """What makes logits of the product with `head_weight`, as `cross_entropy` takes it."""
        told: dict[str, Any] = {}
        if self.config.logit_cap is not None:
            told["soft_cap"] = self.config.logit_cap
        if self.head_bias is not None:
            bias = gather_weight(self.head_bias[...], ("vocab",), dtype=jnp.dtype("float32"))
            told["bias"] = bias * self.config.logit_scale
        return told

    def logits(self, hidden: Float[Array, "*lead d"]) -> Float[Array, "*lead v"]:
        """Logits of the hidden states given; pass chosen tokens only where not all are needed."""
        logits, readout = hidden @ self.head_weight(), self.readout
        if "bias" in readout:
            logits = logits + readout["bias"].astype(logits.dtype)
        cap = readout.get("soft_cap")
        return logits if cap is None else cap * jnp.tanh(logits / cap)

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

    def _routed(self, x: Array, segments: Any, tokens: Any, key: Any) -> dict[str, Any]:
        """What of the side inputs experts ask for: which tokens are some, their ids, a key."""
        mixture = self.config.mixture
        if mixture is None:
            return {}
        valid = jnp.ones(x.shape[:2], bool) if segments is None else segments >= 0
        if tokens is None and mixture.gate == "hash":
            raise InputError("hidden: gate 'hash' goes by token ids; give tokens, not embeddings")
        return {
            "valid": valid,
            "token_ids": tokens if mixture.gate == "hash" else None,
            "key": _row_keys(key, x.shape[0]) if mixture.draws else None,
        }

    def _sights(self) -> list[Sight]:
        """Those that the attention of its layers has."""
        modules = (module for _, module in nnx.iter_graph(self.layers))
        sights = [one.shape.sight for one in modules if isinstance(one, Attention)]
        return list(dict.fromkeys(sights)) or [(self.config.sides, self.config.chunk)]

    def _embedded(self, tokens: Any) -> Any:
        x, scale = self.embed(tokens), self.config.embed_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def _typed(self, x: Any, kinds: Any) -> Any:
        """With what the kinds of tokens add, by default that of kind 0."""
        if self.token_types is None:
            if kinds is not None:
                raise InputError(
                    "token_types: the model has no table of kinds of tokens; leave them out, or"
                    " give its configuration token_types"
                )
            return x
        return x + self.token_types(jnp.zeros(x.shape[:2], jnp.int32) if kinds is None else kinds)

    def _run(self, x: Any, positions: Any, side: Side, cache: Any) -> tuple[Any, StackOutput]:
        if self.into is not None:
            x = self.into(x)
        if self.positions is not None:
            x = x + self.positions(positions + self.config.position_offset)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        out = self.layers(residual(x), side, carried=cache)
        last = out.carry if self.norm is None else self.norm(out.carry)
        if self.transform is not None:
            last = self.transform(last)
        return _head_input(last if self.out_of is None else self.out_of(last)), out

    def _check_generates(self) -> None:
        check_vocabulary(self.config)
        if not self.config.causal:
            raise InputError(
                "model: its attention is not causal, so it generates no text; give a decoder"
            )

    def _asked(self, positions: Int[Array, "b s"]) -> Any:
        """The positions, where layers ask for them."""
        return None if self.config.query_growth is None else positions

    def _ropes(self, positions: Int[Array, "b s"], documents: Any) -> dict[str, Any]:
        """Tables of the rotary embeddings that layers have, by their names in `Side`."""
        given = {"rope": self.config.rope, "local_rope": self.config.local_rope}
        ropes = {name: rope for name, rope in given.items() if rope is not None}
        lengths = None
        if any(rope.stretched_from is not None for rope in ropes.values()):
            documents = whole_rows(positions) if documents is None else documents
            lengths = document_lengths(documents, positions)
        return {
            name: rope_tables(positions, rope, self.config.rope_dim, lengths)
            for name, rope in ropes.items()
        }

    def _check_length(self, length: int) -> None:
        if length > self.config.max_seq:
            raise InputError(
                f"sequence length {length} is above the model's {self.config.max_seq};"
                f" shorten the sequence or raise max_seq"
            )


def _row_keys(key: Any, rows: int) -> Any:
    """Data of a random key for each row, from one or as many."""
    if key is None:
        return None
    return jax.random.key_data(row_keys(key, rows))


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


def _head_input(x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
    """Input of the head: the sequence as the batch has it."""
    return constrain(x, "batch", "seq", "embed")
