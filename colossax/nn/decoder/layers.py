"""The layers of a decoder, as its configuration describes them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from colossax.nn.attention import Attention
from colossax.nn.block import MLP, Block, Wiring
from colossax.nn.config import DecoderConfig
from colossax.nn.decoder.cross import CrossAttention
from colossax.nn.decoder.shapes import attention_shape, cross_shape
from colossax.nn.experts import Experts
from colossax.nn.latent import LatentAttention, LatentShape
from colossax.nn.layers import LayerNorm, RMSNorm, Scale, depth_scaled
from colossax.nn.stack.stacked import MakeLayer


def decoder_layer(
    config: DecoderConfig, *, rngs: nnx.Rngs, full: bool = False, bare: bool = False
) -> Block:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, as a configuration describes them.

    Where there is a source, `x + cross(norm(x), source)` stands between them. Where some layers see
    all keys, `full` is whether it is one of them; with `bare` attention
    reads its input as it is.
    """
    std, out_std = _deviations(config)
    attention = _attention(config, rngs, std, out_std, full)
    mlp = MLP(
        config.embed,
        config.mlp,
        rngs=rngs,
        activation=config.activation,
        gated=config.gated,
        bias=config.mlp_bias,
        std=std,
        out_std=out_std,
    )
    return _block(config, attention, mlp, rngs, bare)


def expert_layer(
    config: DecoderConfig,
    *,
    rngs: nnx.Rngs,
    experts: int | None = None,
    full: bool = False,
    bare: bool = False,
) -> Block:
    """`decoder_layer` with the configuration's experts in place of the MLP.

    Args:
        config: Has a mixture.
        rngs: Keys of the parameters.
        experts: How many, where layers differ.
        full: Whether it is one that sees all keys.
        bare: Attention reads its input as it is.
    """
    assert config.mixture is not None
    std, out_std = _deviations(config)
    attention = _attention(config, rngs, std, out_std, full)
    mixed = Experts(
        config.embed,
        config.mixture,
        rngs=rngs,
        activation=config.activation,
        gated=config.gated,
        std=std,
        out_std=out_std,
        vocab=config.vocab,
        experts=experts,
    )
    return _block(config, attention, mixed, rngs, bare)


def _block(config: DecoderConfig, attention: Any, mlp: Any, rngs: nnx.Rngs, bare: bool) -> Block:
    """With cross-attention between both, where there is a source."""
    sublayers = {"attn": attention}
    if config.longest_source is not None:
        std, out_std = _deviations(config)
        sublayers["cross"] = CrossAttention(
            cross_shape(config), rngs=rngs, std=std, out_std=out_std
        )
    first = config.layer_scale
    return Block(
        {**sublayers, "mlp": mlp},
        lambda: make_norm(config),
        wiring_of(config),
        bare=("attn",) if bare else (),
        make_scale=None if first is None else lambda: Scale(config.embed, first),
    )


def _attention(
    config: DecoderConfig, rngs: nnx.Rngs, std: float, out_std: float, full: bool
) -> Attention | LatentAttention:
    """The attention block that the configuration's sizes are of."""
    shape = attention_shape(config, full)
    if isinstance(shape, LatentShape):
        return LatentAttention(shape, rngs=rngs, std=std, out_std=out_std)
    return Attention(shape, rngs=rngs, std=std, out_std=out_std)


def _deviations(config: DecoderConfig) -> tuple[float, float]:
    """Of random parameters, and of those of maps that add to the residual stream."""
    return config.init_std, depth_scaled(config.init_std, config.layers)


def decoder_layers(config: DecoderConfig) -> "Layers":
    """The layers that a configuration describes: alike, or of several kinds."""
    mixture = config.mixture
    counts = (0,) * config.layers if mixture is None else mixture.experts_of(config.layers)
    bare = (not config.first_norm, *(False,) * (config.layers - 1))
    layers = list(zip(counts, config.sees_all, bare, strict=True))
    kinds = config.layer_kinds
    if not kinds:
        return Layers(make=_maker(config, *layers[0]), order=config.layers)
    made = {kind: _maker(config, *layer) for kind, layer in zip(kinds, layers, strict=True)}
    return Layers(make=made, order=kinds)


def _maker(config: DecoderConfig, experts: int, full: bool, bare: bool) -> MakeLayer:
    if not experts:
        return lambda rngs: decoder_layer(config, rngs=rngs, full=full, bare=bare)
    return lambda rngs: expert_layer(config, rngs=rngs, experts=experts, full=full, bare=bare)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a model that brings its own.

    Attributes:
        make: `rngs -> layer`, or one of each kind by name; see `LayerStack`.
        order: How many, or the kind of each.
    """

    make: MakeLayer | Mapping[str, MakeLayer]
    order: int | Sequence[str]


def make_norm(config: DecoderConfig) -> RMSNorm | LayerNorm:
    """The norm this configuration names."""
    if config.norm == "rms":
        return RMSNorm(config.embed, eps=config.norm_eps, from_one=config.norm_from_one)
    return LayerNorm(config.embed, eps=config.norm_eps, bias=config.norm_bias)


def wiring_of(config: DecoderConfig) -> Wiring:
    """Where this configuration has the norms of a layer."""
    return Wiring(
        norm_input=config.norms in ("input", "both"),
        norm_output=config.norms in ("output", "both"),
        norm_sum=config.norms == "sum",
        parallel=config.parallel,
        shared_norm=config.shared_norm,
    )
