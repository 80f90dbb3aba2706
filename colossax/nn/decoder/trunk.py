"""A stack of layers between embeddings and a head: what enters it, and what leaves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from colossax.errors import InputError
from colossax.nn.attention import Attention, FlatTokens, Side, Sight
from colossax.nn.block import residual
from colossax.nn.config import DecoderConfig
from colossax.nn.decoder.cross import CrossAttention, Source
from colossax.nn.decoder.frames import sinusoids
from colossax.nn.decoder.layers import Layers, decoder_layers, make_norm
from colossax.nn.decoder.masks import cross_mask, masks_of, whole_rows
from colossax.nn.decoder.relative import RelativePositions
from colossax.nn.dropout import Noise
from colossax.nn.layers import Embedding, LayerNorm
from colossax.nn.rope import document_lengths, rope_tables, turn_tables
from colossax.nn.stack.stack import LayerStack
from colossax.pallas.attention import Mask
from colossax.sharding import compute_dtype, current_order
from colossax.sharding.experts import row_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """What is known of rows of tokens beside their embeddings.

    Attributes:
        tokens: `[b, s]`, where layers may ask for ids.
        positions: `[b, s]`; None: 0, 1, ... per row.
        points: `[b, s, axes]`, by which a rotary embedding of several axes turns; None: by
            positions, on all axes.
        segments: Documents, `[b, s]`; negative is padding.
        token_types: Kinds of tokens, `[b, s]`; None: 0.
        mask: Who sees whom; None: as the configuration says.
        key: For gates that draw and for dropout: one, or one for each row; None: without.
        source: What an encoder made of the source, `[b, t, d]`.
        source_segments: Documents of the source, `[b, t]`: tokens of a document see those of the
            same number.
    """

    tokens: Any = None
    positions: Any = None
    points: Any = None
    segments: Any = None
    token_types: Any = None
    mask: Mask | None = None
    key: Any = None
    source: Any = None
    source_segments: Any = None


class Trunk(nnx.Module):
    """Embeddings to final hidden states, normed; encoder or decoder as its configuration says.

    Attributes:
        adapter_dropout: Share of what adapters of its layers read that is dropped in training.
    """

    adapter_dropout: float = 0.0

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, layers: Layers | None = None):
        """Build it.

        Args:
            config: Sizes, and the parts where none are given.
            rngs: Keys of the parameters.
            layers: In place of `decoder_layers(config)`.
        """
        self.config = config
        std = config.init_std
        rows, size = config.learned_positions, config.embed
        fixed = sinusoids(rows, size) if config.sinusoids else None
        self.positions = (
            Embedding(rows, size, rngs=rngs, dim="positions", std=std, fixed=fixed)
            if rows
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
        self.relative = (
            None
            if config.relative is None
            else RelativePositions(
                config.relative, config.heads, causal=config.causal, rngs=rngs, std=std
            )
        )
        layers = decoder_layers(config) if layers is None else layers
        self.layers = LayerStack(layers.make, layers.order, rngs=rngs)
        self.norm = make_norm(config) if config.final_norm else None

    @property
    def draws(self) -> bool:
        """Whether it asks for random keys in training: `hidden(..., key=...)`."""
        mixture = self.config.mixture
        drops = bool(self.config.dropout) or bool(self.adapter_dropout)
        return drops or (mixture is not None and mixture.draws)

    def enter(self, x: Float[Array, "b s d"], rows: Rows) -> tuple[Array, Side]:
        """Input of the first layer, of whole rows, and what all layers share.

        Args:
            x: Embeddings.
            rows: Of their tokens.

        Raises:
            InputError: The sequence is longer than the model's, or a source is missing.
        """
        config = self.config
        x = x.astype(compute_dtype(x.dtype))
        if config.patches is None or not config.patches.any_size:
            self._check_length(x.shape[1] - current_order().padding)
        positions = rows.positions
        if positions is None:
            positions = jnp.broadcast_to(current_order().indices(x.shape[1]), x.shape[:2])
        sights = [] if rows.mask is not None else self._sights()
        biases, keys = self._biases(), _row_keys(rows.key, x.shape[0]) if self.draws else None
        noise = Noise.of(config.dropout, keys, x, self.adapter_dropout)
        side = Side(
            masks=masks_of(config, rows.mask, sights, rows.segments, positions, x, biases, noise),
            sights=tuple(sights),
            **self._ropes(positions, rows.segments, rows.points),
            positions=self._asked(positions),
            biases=biases,
            source=self._source(x, rows, noise),
            **self._routed(x, rows, keys),
            noise=noise,
        )
        x = self._placed(self._typed(x, rows.token_types), positions)
        return x if noise is None else residual(noise.entering(x)), side

    def enter_flat(
        self,
        x: Float[Array, "1 t d"],
        tokens: Int[Array, " t"],
        flat: FlatTokens,
        source: Source | None = None,
        points: Any = None,
    ) -> tuple[Array, Side]:
        """Likewise of flat tokens, whose keys and values go into a cache; see `Decoder.decode`.

        Args:
            x: Embeddings.
            tokens: Ids.
            flat: Where each token belongs.
            source: What goes into the cache of a source first.
            points: `[1, t, axes]`, as of `Rows`.
        """
        positions = flat.position[None]
        side = Side(
            flat=flat,
            positions=self._asked(positions),
            biases=self._biases(),
            source=source,
            **self._ropes(positions, flat.seat[None], points, flat.length),
            turns=self._turns(flat.closer),
        )
        if self.config.mixture is not None:
            side = dataclasses.replace(side, valid=flat.seat[None] >= 0, token_ids=tokens[None])
        return self._placed(self._typed(x, None), positions), side

    def leave(self, carry: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """Final hidden states, of what the last layer gave."""
        return carry if self.norm is None else self.norm(carry)

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

    def _placed(self, x: Any, positions: Any) -> Any:
        """As positions make it, on the residual stream."""
        if self.positions is not None:
            x = x + self.positions(positions + self.config.position_offset)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return residual(x)

    def _source(self, x: Array, rows: Rows, noise: Noise | None) -> Source | None:
        """What cross-attention reads, with a mask for all layers."""
        longest, given = self.config.longest_source, rows.source
        if longest is None and given is None:
            return None
        if longest is None:
            raise InputError(
                "hidden: a source is given, and the model's layers read none; leave it out, or give"
                " an encoder-decoder"
            )
        if given is None:
            raise InputError("hidden: the model's layers read a source, and none is given; give it")
        if given.shape[1] > longest:
            raise InputError(
                f"hidden: a source of {given.shape[1]} tokens is above the model's {longest};"
                " shorten it, or raise longest_source"
            )
        mask = cross_mask(self.config, x, given, rows.segments, rows.source_segments, noise)
        return Source(hidden=given, mask=mask)

    def _biases(self) -> tuple[Any, ...]:
        return () if self.relative is None else (self.relative(),)

    def _routed(self, x: Array, rows: Rows, keys: Array | None) -> dict[str, Any]:
        """What of the side inputs experts ask for: which tokens are some, their ids, a key."""
        mixture = self.config.mixture
        if mixture is None:
            return {}
        valid = jnp.ones(x.shape[:2], bool) if rows.segments is None else rows.segments >= 0
        if rows.tokens is None and mixture.gate == "hash":
            raise InputError("hidden: gate 'hash' goes by token ids; give tokens, not embeddings")
        return {
            "valid": valid,
            "token_ids": rows.tokens if mixture.gate == "hash" else None,
            "key": keys if mixture.draws else None,
        }

    def _sights(self) -> list[Sight]:
        """Those that the self-attention of its layers has."""
        modules = (module for _, module in nnx.iter_graph(self.layers))
        sights = [
            one.shape.sight
            for one in modules
            if isinstance(one, Attention) and not isinstance(one, CrossAttention)
        ]
        return list(dict.fromkeys(sights)) or [(self.config.sides, self.config.chunk)]

    def _asked(self, positions: Int[Array, "b s"]) -> Any:
        """The positions, where layers ask for them."""
        return None if self.config.query_growth is None else positions

    def _ropes(
        self, positions: Int[Array, "b s"], documents: Any, points: Any, length: Any = None
    ) -> dict[str, Any]:
        """Tables of the rotary embeddings that layers have, by their names in `Side`."""
        given = {"rope": self.config.rope, "local_rope": self.config.local_rope}
        ropes = {name: rope for name, rope in given.items() if rope is not None}
        lengths = None
        if any(rope.stretched_from is not None for rope in ropes.values()):
            documents = whole_rows(positions) if documents is None else documents
            lengths = document_lengths(documents, positions) if length is None else length[None]
        return {
            name: rope_tables(
                positions if points is None or rope.sections is None else points,
                rope,
                self.config.rope_dim,
                lengths,
            )
            for name, rope in ropes.items()
        }

    def _turns(self, closer: Any) -> Any:
        """Of ropes, tables that turn queries back by so much; None where there is nothing to."""
        if closer is None:
            return None
        given = {"rope": self.config.rope, "local_rope": self.config.local_rope}
        return {
            name: turn_tables(-closer[None], rope, self.config.rope_dim)
            for name, rope in given.items()
            if rope is not None
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
