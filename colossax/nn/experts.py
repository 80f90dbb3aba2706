"""Experts in place of an MLP."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from colossax.errors import InputError
from colossax.layerwise import LayerState, Maximum
from colossax.nn.block import ACTIVATIONS, MLP, block_input, check_activation
from colossax.nn.block import gated as act_gated
from colossax.nn.config.mixture import MixtureConfig
from colossax.nn.layers import Linear
from colossax.nn.module import param
from colossax.sharding import experts as sharded


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertMLP:
    """What an expert does with its rows: as `MLP`.

    Attributes:
        activation: A key of `nn.ACTIVATIONS`, or of `GATED_ACTIVATIONS`.
        gated: Three matrices or two.
        on_input: Weights multiply the rows, not the hidden layer, from where they go out.
        bias: Each matrix has a bias, `up_bias` and so on.
    """

    activation: str = "silu"
    gated: bool = True
    on_input: bool = False
    bias: bool = False

    def __call__(
        self, local: sharded.LocalExperts, rows: Float[Array, "r d"], weight: Float[Array, " r"]
    ) -> Float[Array, "r d"]:
        """See `colossax.sharding.experts`."""
        by = weight[:, None]
        if self.on_input:
            rows = (rows * by).astype(rows.dtype)
        up = self._mapped(local, rows, "up")
        if self.gated:
            hidden = act_gated(self.activation, self._mapped(local, rows, "gate"), up)
        else:
            hidden = ACTIVATIONS[self.activation](up)
        if not self.on_input:
            hidden = (hidden * by).astype(rows.dtype)
        out = local.times(hidden, "down", last=True)
        if not self.bias:
            return out
        # Devices that split the hidden features are summed up: of the bias each brings a part.
        bias = local.of_rows("down_bias", len(rows)) / local.share
        return out + (bias if self.on_input else bias * by).astype(out.dtype)

    def _mapped(self, local: sharded.LocalExperts, rows: Array, name: str) -> Array:
        out = local.times(rows, name)
        return out + local.of_rows(f"{name}_bias", len(rows)) if self.bias else out


@dataclasses.dataclass(frozen=True)
class MoveBias:
    """How the bias of a choice moves after a step; its gradient is the choices of each expert."""

    rate: float

    def __call__(self, bias: Array, counts: Array) -> Array:
        """The bias of the next step."""
        return sharded.moved_bias(bias, counts, self.rate)


def take_shares(_shares: Array, counts: Array) -> Array:
    """The share of choices of each expert, in place of those of the step before."""
    counts = counts.astype(jnp.float32)
    return counts / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1.0)


EXPERT_MATRICES = ("up", "gate", "down")


class Experts(nnx.Module):
    """A router, a gate and experts: a `Sublayer`.

    Parameters are `router/w` `[d, e]` (of the cosine router also `router/vectors` and
    `router/log_temperature`), `up`, `gate` `[e, d, f]` and `down` `[e, f, d]`, where experts have
    biases `up_bias`, `gate_bias` `[e, f]` and `down_bias` `[e, d]`, an MLP `shared`; and what no
    optimizer moves: `bias` and `shares` `[e]`, see `MixtureConfig`. In place of a matrix there may
    be a module with its `codes` and `scales`.
    """

    takes_parts = True
    """Takes tokens as the residual stream has them; see `Block`."""

    def __init__(
        self,
        embed: int,
        config: MixtureConfig,
        *,
        rngs: nnx.Rngs,
        activation: str = "silu",
        gated: bool = True,
        std: float = 0.02,
        out_std: float | None = None,
        vocab: int = 0,
        experts: int | None = None,
    ):
        """Build it.

        Args:
            embed: Width of the residual stream.
            config: All else of the mixture.
            rngs: Keys of the parameters.
            activation: A key of `nn.ACTIVATIONS`.
            gated: Experts of three matrices or of two.
            std: Standard deviation of random parameters.
            out_std: Of `down`.
            vocab: Token ids, for the gate `hash`.
            experts: How many, of the configuration's `counts`; default its `experts`.

        Raises:
            InputError: The configuration has no layers of so many experts.
        """
        check_activation(activation, gated, "Experts")
        self.config, self.activation, self.gated = config, activation, gated
        self.gating = gate_of(config, vocab)
        count, mlp = config.experts if experts is None else experts, config.mlp
        if count not in config.counts:
            raise InputError(
                f"Experts: found {count} experts, and layers of the mixture have"
                f" {' or '.join(map(str, config.counts))}; give such a number, or a pyramid"
            )
        out_std = std if out_std is None else out_std

        def drawn(shape: tuple[int, ...], deviation: float) -> Array:
            return jax.random.normal(rngs.params(), shape, jnp.float32) * deviation

        self.router = Router(embed, config, count, rngs=rngs, std=std)
        into, out = ("expert_embed", "expert_mlp"), ("expert_mlp", "expert_embed")
        self.up = param(drawn((count, embed, mlp), std), ("experts", *into))
        self.gate = param(drawn((count, embed, mlp), std), ("experts", *into)) if gated else None
        self.down = param(drawn((count, mlp, embed), out_std), ("experts", *out))
        for each in (self.up, self.gate, self.down):
            if each is not None:
                each.set_metadata(own_fetch=True)
        for name, width, dim in (
            ("up_bias", mlp, "expert_mlp"),
            ("gate_bias", mlp, "expert_mlp"),
            ("down_bias", embed, "expert_embed"),
        ):
            wanted = config.expert_bias and (gated or name != "gate_bias")
            bias = param(jnp.zeros((count, width)), ("experts", dim)) if wanted else None
            setattr(self, name, bias)
        self.bias = (
            param(
                jnp.zeros((count,)), ("scores",), dtype="float32", update=MoveBias(config.bias_rate)
            )
            if config.bias_rate
            else None
        )
        self.shares = (
            param(jnp.full((count,), 1 / count), ("scores",), dtype="float32", update=take_shares)
            if config.balance == "global"
            else None
        )
        common: dict[str, Any] = {"activation": activation, "gated": gated}
        self.shared = (
            MLP(embed, config.shared, rngs=rngs, std=std, out_std=out_std, **common)
            if config.shared
            else None
        )
        self.shared_gate = (
            Linear((embed, 1), ("embed", "gated"), rngs=rngs, std=std)
            if config.shared and config.shared_gated
            else None
        )
        self.shared_mix = (
            Linear((embed, 2), ("embed", "gated"), rngs=rngs, std=std)
            if config.shared_mix == "softmax"
            else None
        )

    def mix(
        self, x: Float[Array, "b s d"], side: Any, state: LayerState
    ) -> tuple[Float[Array, "b s d"], LayerState, dict]:
        """See `Sublayer`; counts are those of `sharding.experts.moe`.

        Of a pyramid the load is as long as its largest layer has it, below 0 for experts that are
        none.
        """
        variables = {
            name: jax.lax.stop_gradient(held[...])
            for name, held in (("bias", self.bias), ("shares", self.shares))
            if held is not None
        }
        keys = None if side.key is None else layer_keys(side.key, state.index)
        y, sums = sharded.moe(
            x,
            self.router.weights,
            self._weights(state),
            gate=self.gating,
            valid=side.valid,
            token_ids=side.token_ids,
            key=keys,
            variables=variables,
            balance=self.config.balance,
            decoding=side.flat is not None,
        )
        for held in (self.bias, self.shares):
            if held is not None:
                y = counted(y, held[...], sums["expert_load"])
        if self.shared is not None:
            y = self._with_shared(y, block_input(x))
        if lacking := max(self.config.counts) - sums["expert_load"].shape[0]:
            # Less one a token, however many microbatches are added up.
            real = jnp.ones(x.shape[:2]) if side.valid is None else side.valid
            fill = jnp.broadcast_to(-jnp.sum(real, dtype=jnp.float32), (lacking,))
            sums["expert_load"] = jnp.concatenate([sums["expert_load"], fill])
        return y, state, {**sums, "dispatch_passes": Maximum(sums["dispatch_passes"])}

    def _with_shared(self, y: Float[Array, "b s d"], x: Any) -> Float[Array, "b s d"]:
        """What the experts gave together with what the MLP beside them does."""
        assert self.shared is not None
        beside = self.shared(x)
        if self.shared_mix is not None:
            share = jax.nn.softmax(self.shared_mix(x).astype(jnp.float32)).astype(beside.dtype)
            return share[..., :1] * beside + share[..., 1:] * y
        if self.shared_gate is not None:
            beside = beside * jax.nn.sigmoid(self.shared_gate(x))
        return y + beside

    def _weights(self, state: LayerState) -> sharded.ExpertWeights:
        names = [name for name in EXPERT_MATRICES if self.gated or name != "gate"]
        into, out = ("expert_embed", "expert_mlp"), ("expert_mlp", "expert_embed")
        dims = {name: ("experts", *(out if name == "down" else into)) for name in names}
        if self.config.expert_bias:
            dims |= {f"{name}_bias": ("experts", dims[name][-1]) for name in names}
        arrays = {}
        for name in tuple(dims):
            held = getattr(self, name)
            if isinstance(held, nnx.Variable):
                arrays[name] = held[...]
            else:
                scales = sharded.scales_of(name)
                arrays[name], arrays[scales] = held.codes[...], held.scales[...]
                dims[scales] = ("experts", dims[name][-1])
        return sharded.ExpertWeights(
            arrays=arrays,
            dims=dims,
            compute=ExpertMLP(
                activation=self.activation,
                gated=self.gated,
                on_input=self.config.on_input,
                bias=self.config.expert_bias,
            ),
            layer=state.at,
        )


class Router(nnx.Module):
    """The router's parameters."""

    def __init__(
        self, embed: int, config: MixtureConfig, experts: int, *, rngs: nnx.Rngs, std: float
    ):
        linear = config.router == "linear"
        width = experts if linear else config.router_dim
        into = "scores" if linear else None
        self.w = param(jax.random.normal(rngs.params(), (embed, width)) * std, ("embed", into))
        self.b = param(jnp.zeros((width,)), ("scores",)) if config.router_bias and linear else None
        self.vectors = (
            None
            if linear
            else param(jax.random.normal(rngs.params(), (width, experts)), (None, "scores"))
        )
        # Cosines begin to be divided by 0.07, as those of X-MoE.
        self.log_temperature = None if linear else param(jnp.log(jnp.float32(0.07)), ())

    @property
    def weights(self) -> sharded.Router:
        """As `sharding.experts` takes it."""
        if self.vectors is None or self.log_temperature is None:
            b = None if self.b is None else self.b[...]
            return sharded.LinearRouter(w=self.w[...], b=b)
        return sharded.CosineRouter(
            w=self.w[...], vectors=self.vectors[...], log_temperature=self.log_temperature[...]
        )


def layer_keys(rows: Array, layer: Any) -> Array:
    """Random keys of a layer, from the data of one for each row, `[b, 2]`."""
    keys = jax.random.wrap_key_data(rows)
    return jax.vmap(lambda key: jax.random.fold_in(key, layer))(keys)


@jax.custom_vjp
def counted(y: Array, held: Array, counts: Array) -> Array:
    """`y`, with `counts` as the gradient by `held`, whatever that by `y` is.

    So counts are added up over microbatches and devices as gradients are, and what recomputes a
    layer counts once.
    """
    return y


counted.defvjp(
    lambda y, held, counts: (y, (jnp.zeros((0,), held.dtype), counts)),
    lambda saved, dy: (dy, saved[1].astype(saved[0].dtype), None),
)


def gate_of(config: MixtureConfig, vocab: int) -> sharded.Gate:
    """The gate that a configuration names."""
    k = config.choices
    capacity = (
        None
        if config.capacity_factor is None
        else sharded.Capacity(factor=config.capacity_factor, priority=config.priority)
    )
    match config.gate:
        case "ktop1":
            return sharded.KTop1(k=k, capacity=capacity)
        case "hierarchical":
            return sharded.Hierarchical(k=k, groups=config.groups, capacity=capacity)
        case "gshard":
            return sharded.GShard(factor=config.capacity_factor or 1.0)
        case "hash":
            return sharded.Hash(vocab=vocab)
        case "dense_to_sparse":
            return sharded.DenseToSparse(
                threshold=config.threshold, temperature=config.temperature, most=k
            )
        case "expert_choice":
            return sharded.ExpertChoice(k=k)
        case "base":
            return sharded.Base()
    return sharded.TopK(
        k=k,
        score=config.score,
        renormalise=config.renormalise,
        scale=config.scale,
        groups=config.groups,
        kept_groups=config.kept_groups,
        group_score=config.group_score,
        capacity=capacity,
    )
