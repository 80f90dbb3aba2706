"""Sizes and parts of a decoder, as data: nothing here imports JAX."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

from colossax.config import Count, Natural, NotNegative, Positive, check_types, nearest, within
from colossax.errors import InputError
from colossax.nn.mixture import MixtureConfig

if TYPE_CHECKING:
    from colossax.nn.attention import AttentionShape

ACTIVATION_NAMES = ("silu", "relu", "gelu", "gelu_tanh")
"""Keys of `nn.ACTIVATIONS`."""


LayerCount = Annotated[int, within(1, 16_384)]
"""Layers of a stack. Describing one takes 0.2 ms, so that more are refused before they are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Stretches long wavelengths by `factor`, keeps short ones, blends between.

    Source: the Llama 3.1 model card's configuration (`rope_type: llama3`).
    """

    factor: Positive = 8.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_positions: Count = 8192

    def __post_init__(self):
        check_types(self, "model.rope_scaling")
        if self.high_freq_factor <= self.low_freq_factor:
            raise InputError(
                f"model.rope_scaling.high_freq_factor: found {self.high_freq_factor}; give more"
                f" than low_freq_factor, {self.low_freq_factor}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Base and scaling. `linear_factor` divides every frequency (position interpolation)."""

    theta: Positive = 10_000.0
    linear_factor: Positive = 1.0
    llama3: Llama3Scaling | None = None

    def __post_init__(self):
        check_types(self, "model.rope")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and parts of a decoder.

    Attributes:
        vocab: Tokens of the vocabulary.
        embed: Width of the residual stream.
        layers: How many layers.
        heads: Heads of queries.
        kv_heads: Heads of keys and values; they divide heads.
        head_dim: Width of a head; none, where a family may leave it out: embed / heads.
        mlp: Width of the MLP's hidden layer.
        norm_eps: Added under the root of a norm.
        init_std: Standard deviation of random parameters.
        mlp_bias: Biases in the MLP.
        norm: `rms` or `layer`.
        activation: A key of `nn.ACTIVATIONS`.
        gated: Gated MLP (three matrices) or plain (two).
        rope: Rotary embedding, or None.
        alibi: Distance penalty per head in place of position embeddings.
        learned_positions: Rows of a learned position table (0: none), of which the first
            `position_offset` are never reached.
        embed_norm: LayerNorm after the token embedding.
        window: Keys a query sees, itself included, as the families' files count them; None: all
            before it. Nothing below this type counts so: see `sides`.
        tied: The output head is the embedding table.
        max_seq: Longest sequence the model was made for.
        eos: Token that ends a document, where known.
        mixture: Experts in place of the MLPs of all layers or of some; None: there are none.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    head_dim: Count
    mlp: Count
    max_seq: Count
    norm: str = "rms"
    norm_eps: NotNegative = 1e-6
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig | None = None
    alibi: bool = False
    learned_positions: Natural = 0
    position_offset: Natural = 0
    embed_norm: bool = False
    window: Count | None = None
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None
    mixture: MixtureConfig | None = None

    def __post_init__(self):
        check_types(self, "model")
        if self.mixture is not None:
            self.mixture.kinds(self.layers)
        if self.eos is not None and self.eos >= self.vocab:
            raise InputError(
                f"model.eos: found {self.eos}, which is none of the vocabulary's {self.vocab}"
                f" tokens; give 0 to {self.vocab - 1}, or none"
            )
        if self.heads % self.kv_heads:
            raise InputError(
                f"model: {self.heads} heads cannot share {self.kv_heads} kv heads evenly;"
                f" choose kv_heads that divide heads"
            )
        if self.activation not in ACTIVATION_NAMES:
            raise InputError(
                f"model: activation '{self.activation}' is unknown"
                f"{nearest(self.activation, ACTIVATION_NAMES)}"
            )
        if self.norm not in ("rms", "layer"):
            raise InputError(f"model: norm '{self.norm}' is unknown; use 'rms' or 'layer'")
        if self.rope is not None and self.head_dim % 2:
            raise InputError(
                f"model: rope turns pairs of a head's dims, and head_dim {self.head_dim} is odd;"
                " choose an even one"
            )

    @property
    def sides(self) -> tuple[int, int] | None:
        """The window as all below has it: keys strictly before a query, and strictly after it."""
        return None if self.window is None else (self.window - 1, 0)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer; none where all are of one."""
        kinds = () if self.mixture is None else self.mixture.kinds(self.layers)
        return kinds if len(set(kinds)) > 1 else ()

    @property
    def flops_per_token(self) -> int:
        """Matmul FLOPs of forward and backward per token, attention scores aside: 6 per weight.

        Of experts those that a token takes are counted, and the router.
        """
        attention = self.embed * self.head_dim * 2 * (self.heads + self.kv_heads)
        matrices = 3 if self.gated else 2
        mlp = self.embed * self.mlp * matrices
        mlps, mixed = self.layers * mlp, self.mixture
        if mixed is not None:
            counts = mixed.experts_of(self.layers)
            beside = mixed.shared_gated + 2 * (mixed.shared_mix == "softmax")
            width = (mixed.choices * mixed.mlp + mixed.shared) * matrices + beside
            mlps = sum(self.embed * (width + count) if count else mlp for count in counts)
        return 6 * (self.layers * attention + mlps + self.embed * self.vocab)

    def train_flops_per_token(self, seq_len: int) -> int:
        """`flops_per_token` plus causal attention: 6 head_dim heads per visible key and layer.

        A query sees (seq_len + 1) / 2 keys on average, or w - w (w - 1) / (2 seq_len) of a window
        of w; 2 matmuls of 2 FLOPs, three times for forward and backward. Recomputation is never
        counted.
        """
        seen = seq_len if self.window is None else min(self.window, seq_len)
        keys = seen - seen * (seen - 1) / (2 * seq_len)
        return int(self.flops_per_token + 12 * self.layers * self.heads * self.head_dim * keys)

    def attention_shape(self) -> "AttentionShape":
        """The part of this configuration that an attention block needs."""
        from colossax.nn.attention import AttentionShape  # JAX, which sizes do without

        names = {f.name for f in dataclasses.fields(AttentionShape)} - {"window"}
        return AttentionShape(**{n: getattr(self, n) for n in names}, window=self.sides)


class FamilyConfig:
    """A family's configuration, checked when it is made: its fields, and the decoder they make."""

    def __post_init__(self):
        check_types(self, "model")
        self.decoder()

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        raise NotImplementedError


def even_head_dim(embed: int, heads: int) -> int:
    """`embed / heads`.

    Raises:
        InputError: The heads do not divide it.
    """
    if embed % heads:
        raise InputError(
            f"model: {heads} heads do not divide embed {embed};"
            f" choose heads that do, or give head_dim where the family has it"
        )
    return embed // heads
