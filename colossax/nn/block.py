"""One layer of a model: sublayers around a residual stream, where the norms stand, and the MLP."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from colossax.config import nearest
from colossax.errors import InputError, PlanError
from colossax.layerwise import LayerState
from colossax.nn.cache import CacheSpec
from colossax.nn.config import GATED_ACTIVATIONS
from colossax.nn.dropout import in_sublayer
from colossax.nn.layers import Linear
from colossax.sharding import activation_axes, constrain, current, kept_share, linears, seq_axes
from colossax.typing import Dims

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "tanh": jnp.tanh,
}


def gated(activation: str, gate: Array, up: Array) -> Array:
    """`act(gate) * up`, or what the activation makes of both."""
    if activation == "clamped_swiglu":
        return clamped_swiglu(gate, up)
    return ACTIVATIONS[activation](gate) * up


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """`gate sigmoid(1.702 gate) (up + 1)`, gate clipped at 7 from above, up on both sides.

    Source: OpenAI 2025, gpt-oss.
    """
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def check_activation(activation: str, is_gated: bool, where: str) -> None:
    """Refuse one that there is not.

    Raises:
        InputError: That, or one of two inputs where there is no gate.
    """
    known = (*ACTIVATIONS, *GATED_ACTIVATIONS)
    if activation not in known:
        raise InputError(
            f"{where}: activation '{activation}' is unknown{nearest(activation, known)}"
        )
    if activation in GATED_ACTIVATIONS and not is_gated:
        raise InputError(
            f"{where}: activation '{activation}' takes a gate; give gated, or one of"
            f" {', '.join(ACTIVATIONS)}"
        )


Hidden = Float[Array, "b s d"]


@runtime_checkable
class Sublayer(Protocol):
    """What mixes tokens, or transforms each: attention, an MLP, experts, a recurrence."""

    def mix(self, x: Array, side: Any, state: LayerState) -> tuple[Array, LayerState, dict]:
        """What is added to the residual stream.

        Args:
            x: `[b, s, d]`, normed where the block norms its inputs.
            side: What all layers share.
            state: The layer's number and what travels with it.

        Returns:
            `[b, s, d]`, the state, and sums over tokens by name (float32 arrays, or `Maximum`).
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wiring:
    """Where a block's norms stand, and how what a sublayer gives joins the residual stream.

    Attributes:
        norm_input: `f(norm(x))`: pre-norm.
        norm_output: `norm(f(x))` before it is added: with `norm_input` a sandwich (Gemma 2), alone
            the form of OLMo 2.
        norm_sum: `norm(x + f(x))`: post-norm, as in Vaswani et al. 2017.
        parallel: Every sublayer reads the block's input (GPT-NeoX); else the sum so far.
        shared_norm: That input is normed once for all of them (GPT-J).
        scale: What a sublayer gives is multiplied by.
    """

    norm_input: bool = True
    norm_output: bool = False
    norm_sum: bool = False
    parallel: bool = False
    shared_norm: bool = False
    scale: float = 1.0

    def __post_init__(self):
        if self.parallel and self.norm_sum:
            raise InputError(
                "Wiring: parallel sublayers share one sum, which norm_sum would norm once for each;"
                " give norm_input or norm_output"
            )
        if self.shared_norm and not (self.parallel and self.norm_input):
            raise InputError(
                "Wiring: shared_norm norms the input that parallel sublayers read; give parallel"
                " and norm_input too"
            )


class Block(nnx.Module):
    """A layer from named sublayers, in order, each added to the residual stream.

    Sublayer `attn` stands in the block under its name, norms beside it as `attn_norm` (of its
    input), `attn_output_norm` and `attn_sum_norm`: so they are named in checkpoints. One norm
    for all is `shared_norm`. What the channels of its output are multiplied by is `attn_scale`.
    """

    def __init__(
        self,
        sublayers: Mapping[str, Sublayer],
        make_norm: Callable[[], nnx.Module],
        wiring: Wiring | None = None,
        *,
        bare: Collection[str] = (),
        make_scale: Callable[[], nnx.Module] | None = None,
    ):
        """Put it together.

        Args:
            sublayers: By name, in the order in which they run.
            make_norm: A norm of the residual stream.
            wiring: Default pre-norm.
            bare: Sublayers that read their input as it is, whatever the wiring norms.
            make_scale: A learned factor of what a sublayer gives; None: there is none.
        """
        self.wiring = Wiring() if wiring is None else wiring
        self.names = tuple(sublayers)
        self.shared_norm = make_norm() if self.wiring.shared_norm else None
        norm_input = self.wiring.norm_input and not self.wiring.shared_norm
        for name, sublayer in sublayers.items():
            setattr(self, name, sublayer)
            for which, wanted in (
                ("norm", norm_input and name not in bare),
                ("output_norm", self.wiring.norm_output),
                ("sum_norm", self.wiring.norm_sum),
            ):
                if wanted:
                    setattr(self, f"{name}_{which}", make_norm())
            if make_scale is not None:
                setattr(self, f"{name}_scale", make_scale())

    def __call__(self, x: Hidden, side: Any, state: LayerState) -> tuple[Hidden, LayerState, dict]:
        """See `LayerStack`. Sums of several sublayers under one name are refused."""
        x = residual(x)
        start, sums = x if self.shared_norm is None else self.shared_norm(x), {}
        noise = getattr(side, "noise", None)
        for number, name in enumerate(self.names):
            if noise is not None:
                side = dataclasses.replace(side, noise=noise.within(state.index, number))
            read = start if self.wiring.parallel else x
            sublayer, read = getattr(self, name), self._beside(name, "norm", read)
            # Where tokens are routed one by one, each device brings those it has.
            given = residual(read) if getattr(sublayer, "takes_parts", False) else block_input(read)
            with in_sublayer(None if noise is None else side.noise):
                y, state, counts = sublayer.mix(given, side, state)
            y = residual(self._beside(name, "scale", self._beside(name, "output_norm", y)))
            y = y if noise is None else residual(side.noise.added(y))
            x = x + (y if self.wiring.scale == 1 else y * self.wiring.scale)
            x = self._beside(name, "sum_norm", x)
            if clash := sorted(sums.keys() & counts):
                raise InputError(
                    f"Block: sublayer '{name}' counts {clash}, and so does one before it; give each"
                    " count a name of its own"
                )
            sums |= counts
        return x, state, sums

    def cache_spec(
        self, *, layers: int, seats: int, slots: int, chunk: int | None = None
    ) -> CacheSpec:
        """What its sublayers keep of tokens, for these many layers; see `Decoder.cache_spec`.

        Raises:
            InputError: None of them says, or two say the same names.
        """
        sublayers = [getattr(self, name) for name in self.names]
        keeping = [one for one in sublayers if hasattr(one, "cache_spec")]
        specs = [
            one.cache_spec(layers=layers, seats=seats, slots=slots, chunk=chunk) for one in keeping
        ]
        arrays = {name: array for spec in specs for name, array in spec.arrays.items()}
        if not specs or len(arrays) < sum(len(spec.arrays) for spec in specs):
            raise InputError(
                f"Block: {len(keeping)} of the sublayers {', '.join(self.names)} have a cache_spec,"
                " and generation needs one or more, each with names of arrays of its own; give it"
                " to those that mix tokens"
            )
        return CacheSpec(arrays=arrays, kind=specs[0].kind)

    def _beside(self, name: str, which: str, x: Array) -> Array:
        module = getattr(self, f"{name}_{which}", None)
        return x if module is None else module(x)


class MLP(nnx.Module):
    """`down(act(up(x)))`, or gated `down(act(gate(x)) * up(x))`."""

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        rngs: nnx.Rngs,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        std: float = 0.02,
        out_std: float | None = None,
    ):
        check_activation(activation, gated, "MLP")
        self.activation = activation

        def make(shape: tuple[int, int], dims: Dims, std: float) -> Linear:
            return Linear(shape, dims, rngs=rngs, bias=bias, std=std)

        self.gate = make((embed, mlp), ("embed", "mlp"), std) if gated else None
        self.up = make((embed, mlp), ("embed", "mlp"), std)
        self.down = make((mlp, embed), ("mlp", "embed"), std if out_std is None else out_std)

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        parts = [self._tokens(tokens, name) for name, tokens in _split_tokens(x).items()]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def mix(
        self, x: Float[Array, "b s d"], side: Any, state: LayerState
    ) -> tuple[Float[Array, "b s d"], LayerState, dict]:
        """See `Sublayer`."""
        return self(x), state, {}

    def _tokens(self, x: Float[Array, "b s d"], name: str) -> Float[Array, "b s d"]:
        if self.gate is None:
            act = ACTIVATIONS[self.activation]
            return self.down(act(_hidden(self.up(x), name)))
        maps = (self.up.map, self.gate.map)
        up, gate = (_hidden(h, name) for h in linears(x, maps))
        return self.down(gated(self.activation, gate, up))


def _split_tokens(x: Float[Array, "b s d"]) -> dict[str, Float[Array, "b _ d"]]:
    """By name, the tokens whose hidden states are kept for backward and the others, if any.

    They part before the matmuls: a slice of the hidden states would keep all of them alive.

    Raises:
        PlanError: Several devices hold parts of the sequence.
    """
    share, bound = kept_share(), current()
    if share == 0:
        return {"mlp_recomputed": x}
    if share == 1 or x.shape[1] < 2:
        return {"mlp": x}
    if bound is not None and seq_axes(bound):
        raise PlanError(
            f"segments.mlp_share: {share} parts the tokens of a row, which several devices"
            f" hold along {list(seq_axes(bound))}; keep the 'mlp' of all tokens or of none"
        )
    first = min(max(round(share * x.shape[1]), 1), x.shape[1] - 1)
    return {"mlp": x[:, :first], "mlp_recomputed": x[:, first:]}


def _hidden(h: Float[Array, "b s f"], name: str) -> Float[Array, "b s f"]:
    return checkpoint_name(constrain(h, "batch:inner", "seq", "mlp"), name)


def residual(x: Hidden) -> Hidden:
    """The residual stream between blocks; a plan may split its sequence over `tensor`."""
    return constrain(x, "batch", "seq:residual", "embed")


def block_input(x: Hidden) -> Hidden:
    """Input of a block: the sequence as its first matmuls want it."""
    if _moves_tokens():
        # Else the compiler may gather what the norm computes in float32 before it is rounded.
        x = jax.lax.optimization_barrier(residual(x))
    return constrain(x, "batch", "seq:block", "embed")


def _moves_tokens() -> bool:
    """Whether the plan splits the sequence between blocks more than at their first matmuls."""
    bound = current()
    if bound is None:
        return False
    return activation_axes(bound, "seq:residual") != activation_axes(bound, "seq:block")
