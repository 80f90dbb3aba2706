"""Sizes and parts of a decoder, as data: nothing here imports JAX."""

import dataclasses
from typing import Annotated

from colossax.config import Count, Natural, NotNegative, Positive, check_types, nearest, within
from colossax.errors import InputError
from colossax.nn.config.dropout import DropoutConfig
from colossax.nn.config.frames import FramesConfig
from colossax.nn.config.head import ACTIVATION_NAMES, HeadConfig, TransformConfig
from colossax.nn.config.mixture import MixtureConfig
from colossax.nn.config.parts import LatentConfig, QueryGrowth, RelativeConfig, RopeConfig
from colossax.nn.config.patches import PatchConfig
from colossax.nn.config.reading import check_reads

GATED_ACTIVATIONS = ("clamped_swiglu",)
"""Those that are no function of the gate times the other input."""


_QK_NORMS = ("qk_norm", "qk_norm_whole", "qk_norm_layer")

NORMS = {
    "input": "of what a sublayer reads (pre-norm)",
    "output": "of what it gives, before that is added",
    "both": "of both (a sandwich)",
    "sum": "of the sum (post-norm)",
}
"""Where a block's norms stand."""

LayerCount = Annotated[int, within(1, 16_384)]
"""Layers of a stack. Describing one takes 0.2 ms, so that more are refused before they are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and parts of a decoder, or of an encoder: the same, its attention not causal.

    Attributes:
        causal: Tokens see those before them; else those behind them too, and no text is generated.
        vocab: Tokens of the vocabulary; 0 of a model that reads `patches` or `frames`.
        patches: Of images that it reads in place of tokens; None: it reads tokens.
        frames: Of sound, likewise, of the encoder of an encoder-decoder.
        embed: Width of the residual stream.
        layers: How many layers.
        heads: Heads of queries.
        kv_heads: Heads of keys and values; they divide heads.
        head_dim: Width of a head; none, where a family may leave it out: embed / heads.
        mlp: Width of the MLP's hidden layer.
        norm_eps: Added under the root of a norm.
        init_std: Standard deviation of random parameters.
        mlp_bias: Biases in the MLP.
        key_bias: Where queries and values have biases, keys have them too.
        norm: `rms` or `layer`.
        norm_bias: Whether norms by mean and deviation have one.
        norm_from_one: Norms multiply by 1 + their parameter, which begins at 0.
        norms: Where they stand, see `NORMS`.
        first_norm: Whether the first layer's attention norms what it reads, as the others do.
        final_norm: Whether there is one before the head.
        parallel: Attention and MLP read the same input; else the MLP what attention added to.
        shared_norm: What both read is normed once; else each has a norm.
        activation: A key of `nn.ACTIVATIONS`, or one of `GATED_ACTIVATIONS`.
        gated: Gated MLP (three matrices) or plain (two).
        rope: Rotary embedding, or None.
        alibi: Distance penalty per head in place of position embeddings.
        alibi_scale: Times which that is taken.
        learned_positions: Rows of a learned position table (0: none), of which the first
            `position_offset` are never reached.
        sinusoids: That table holds sines and cosines of positions, and does not learn.
        relative: Biases of scores by distance, which all layers share, or None.
        layer_scale: What sublayers give is multiplied by a learned factor of each channel, which
            begins at this; None: it is not.
        token_types: Rows of a table of kinds of tokens, added to their embeddings (0: none).
        embed_norm: LayerNorm after the token embedding.
        embed_scale: Times which tokens' embeddings are taken.
        token_width: Of embeddings and head, which are mapped to `embed` and back; None: as wide.
        logit_scale: Times which logits are taken.
        logit_cap: Their bound, `cap tanh(logit / cap)`; None: they have none.
        head_bias: A number added to each token's logit.
        transform: Of hidden states before logits of the vocabulary; None: there is none.
        head: What is told in place of those logits; None: they are.
        qk_norm: Queries and keys are normed, each head alone, with a scale.
        qk_norm_whole: All heads of a token together.
        qk_norm_layer: They are normed by mean and deviation, each head with scales of its own.
        qk_unit: Queries and keys are divided by their root mean square after rope, in layers that
            have it.
        sinks: One more logit per head, learned, in the denominator of attention only.
        query_growth: In layers without rope.
        score_scale: Times which products of queries and keys are taken; None: 1 / sqrt(head_dim).
        score_cap: Bound of those, `cap tanh(score / cap)`; None: they have none.
        window: Keys a query sees, itself included, as the families' files count them; None: all
            before it. Where attention is not causal, half of it lies on each side. Nothing below
            this type counts so: see `sides`.
        chunk: Keys a query sees are those of its own chunk of so many positions; None: of all.
        full_layers: Numbers of the layers that see all keys before them, whatever window and chunk
            say.
        full_rope: Those layers have rope as the others.
        local_rope: Of the others, where it is another; None: `rope`.
        longest_source: Layers attend, between attention and MLP, to what an encoder made of at most
            so many tokens of a source; None: there is no source.
        tied: The output head is the embedding table.
        max_seq: Longest sequence the model was made for.
        start: Token that texts begin with where they are written, where known.
        eos: Token that ends a document, where known.
        mixture: Experts in place of the MLPs of all layers or of some; None: there are none.
        latent: Attention whose keys and values are made from one vector a token; `head_dim` is then
            that of its queries and keys. None: each head has its own.
        dropout: Shares of values that are dropped in training.
    """

    vocab: Natural
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    head_dim: Count
    mlp: Count
    max_seq: Count
    causal: bool = True
    norm: str = "rms"
    norm_eps: NotNegative = 1e-6
    norm_bias: bool = True
    norm_from_one: bool = False
    norms: str = "input"
    first_norm: bool = True
    final_norm: bool = True
    parallel: bool = False
    shared_norm: bool = False
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    key_bias: bool = True
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qk_norm_layer: bool = False
    qk_unit: bool = False
    sinks: bool = False
    query_growth: QueryGrowth | None = None
    score_scale: Positive | None = None
    score_cap: Positive | None = None
    rope: RopeConfig | None = None
    alibi: bool = False
    alibi_scale: Positive = 1.0
    learned_positions: Natural = 0
    position_offset: Natural = 0
    sinusoids: bool = False
    relative: RelativeConfig | None = None
    layer_scale: Positive | None = None
    token_types: Natural = 0
    embed_norm: bool = False
    embed_scale: Positive = 1.0
    token_width: Count | None = None
    logit_scale: Positive = 1.0
    logit_cap: Positive | None = None
    head_bias: bool = False
    transform: TransformConfig | None = None
    head: HeadConfig | None = None
    window: Count | None = None
    chunk: Count | None = None
    full_layers: tuple[Natural, ...] = ()
    full_rope: bool = True
    local_rope: RopeConfig | None = None
    longest_source: Count | None = None
    tied: bool = False
    init_std: NotNegative = 0.02
    start: Natural | None = None
    eos: Natural | None = None
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
    patches: PatchConfig | None = None
    frames: FramesConfig | None = None
    dropout: DropoutConfig = DropoutConfig()

    def __post_init__(self):
        check_types(self, "model")
        check_reads(self)
        self._check_latent()
        if self.mixture is not None:
            self.mixture.kinds(self.layers)
        for name, token in (("eos", self.eos), ("start", self.start)):
            if token is not None and token >= self.vocab:
                raise InputError(
                    f"model.{name}: found {token}, which is none of the vocabulary's {self.vocab}"
                    f" tokens; give 0 to {self.vocab - 1}, or none"
                )
        if self.heads % self.kv_heads:
            raise InputError(
                f"model: {self.heads} heads cannot share {self.kv_heads} kv heads evenly;"
                f" choose kv_heads that divide heads"
            )
        known = ACTIVATION_NAMES + (GATED_ACTIVATIONS if self.gated else ())
        if self.activation not in known:
            raise InputError(
                f"model: activation '{self.activation}' is unknown{nearest(self.activation, known)}"
            )
        if self.norm not in ("rms", "layer"):
            raise InputError(f"model: norm '{self.norm}' is unknown; use 'rms' or 'layer'")
        if self.norms not in NORMS:
            raise InputError(f"model: norms '{self.norms}' is unknown{nearest(self.norms, NORMS)}")
        self._check_wiring()
        self._check_ropes()
        self._check_ends()

    def _check_ropes(self) -> None:
        for rope in filter(None, (self.rope, self.local_rope)):
            rope.turned(self.rope_dim)
        if self.local_rope is not None and self.rope is None:
            raise InputError(
                "model.local_rope: it is in place of rope in some layers, and there is none; give"
                " rope, or leave it out"
            )

    def _check_ends(self) -> None:
        if self.relative is not None:
            self.relative.of_side(self.causal)
        if self.alibi and not self.causal:
            raise InputError(
                "model.alibi: its penalties are of tokens before one's own, and attention here is"
                " not causal; leave alibi out, or give causal"
            )
        if self.token_types and self.token_width is not None:
            raise InputError(
                f"model.token_types: their table is as wide as the layers, {self.embed}, and tokens"
                f" have token_width {self.token_width}; leave one of them out"
            )
        if self.head is not None and self.transform is not None:
            raise InputError(
                "model.transform: it stands before logits of the vocabulary, and model.head tells"
                " something else; give head.transform, or leave head out"
            )

    def _check_wiring(self) -> None:
        if not self.first_norm and self.norms != "input":
            raise InputError(
                f"model.first_norm: norms '{self.norms}' are not of what attention reads alone;"
                " give norms 'input', or leave it out"
            )
        if self.norm_from_one and self.norm != "rms":
            raise InputError(
                f"model.norm_from_one: norm is '{self.norm}', whose scale is its parameter; give"
                " norm 'rms', or leave it out"
            )
        several = [name for name in _QK_NORMS if getattr(self, name)]
        if len(several) > 1:
            raise InputError(f"model: {' and '.join(several)} norm the same; give one of them")
        if self.shared_norm and not (self.parallel and self.norms == "input"):
            raise InputError(
                "model.shared_norm: attention and MLP have one norm where both read it; give"
                " parallel, and norms 'input'"
            )
        if self.parallel and self.norms == "sum":
            raise InputError(
                "model.norms: 'sum' norms what attention added to, which parallel sublayers do not"
                " read; give 'input' or 'output'"
            )
        beyond = [layer for layer in self.full_layers if not 0 <= layer < self.layers]
        if beyond:
            raise InputError(
                f"model.full_layers: found {beyond[0]} of {self.layers} layers; give 0 to"
                f" {self.layers - 1}"
            )

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        if self.head_dim != self.latent.head_dim:
            raise InputError(
                f"model.head_dim: found {self.head_dim}, and latent attention has nope_dim +"
                f" rope_dim = {self.latent.head_dim}; give that"
            )
        names = ("qkv_bias", "out_bias", *_QK_NORMS, "alibi", "window")
        names += ("score_scale", "score_cap", "local_rope")
        found = [name for name in names if getattr(self, name)]
        if self.kv_heads != self.heads:
            found.append("kv_heads")
        if found or self.rope is None:
            raise InputError(
                f"model.latent: latent attention goes with {', '.join(found) or 'no rope'} in no"
                " model here; leave biases, norms of queries and keys, alibi, window, scores and"
                " local_rope out, and give rope and as many kv_heads as heads"
            )

    @property
    def rope_dim(self) -> int:
        """Of a head, what is turned by position."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def logit_width(self) -> int:
        """Of what the head multiplies."""
        return self.token_width or self.embed

    @property
    def sides(self) -> tuple[int, int] | None:
        """The window as all below has it: keys strictly before a query, and strictly after it."""
        if self.window is None:
            return None
        return (self.window - 1, 0) if self.causal else (self.window // 2, self.window // 2)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer; none where all are of one.

        `local` or `full` where they see other keys or have another rope, `rope` or `nope` where
        some have none, `MixtureConfig.kinds` where they have other experts, `bare` or `normed`
        where the first lacks a norm, or several: `full_dense`.
        """
        mixed = ("dense",) * self.layers
        if self.mixture is not None:
            mixed = self.mixture.kinds(self.layers)
        near = (self.window, self.chunk, self.local_rope) != (None, None, None)
        names = ("local", "full") if near else ("rope", "nope")
        if not near and self.full_rope:
            names = ("full", "full")
        seen = tuple(names[full] for full in self.sees_all)
        normed = ("normed" if self.first_norm else "bare", *("normed",) * (self.layers - 1))
        told = [names for names in (seen, mixed, normed) if len(set(names)) > 1]
        return tuple("_".join(names) for names in zip(*told, strict=True))

    @property
    def sees_all(self) -> tuple[bool, ...]:
        """Of each layer, whether it is one of `full_layers`."""
        return tuple(at in self.full_layers for at in range(self.layers))

    @property
    def flops_per_token(self) -> int:
        """Matmul FLOPs of forward and backward per token, attention scores aside: 6 per weight.

        Of experts those that a token takes are counted, and the router.
        """
        attention = self.embed * self.head_dim * 2 * (self.heads + self.kv_heads)
        if self.latent is not None:
            attention = self.latent.weights(self.embed, self.heads)
        matrices = 3 if self.gated else 2
        mlp = self.embed * self.mlp * matrices
        mlps, mixed = self.layers * mlp, self.mixture
        if mixed is not None:
            counts = mixed.experts_of(self.layers)
            beside = mixed.shared_gated + 2 * (mixed.shared_mix == "softmax")
            width = (mixed.taken * mixed.mlp + mixed.shared) * matrices + beside
            mlps = sum(self.embed * (width + count) if count else mlp for count in counts)
        head = self._head_weights
        if self.token_width is not None:
            head += 2 * self.token_width * self.embed
        if self.patches is not None:
            head += self.patches.numbers * self.embed
        if self.frames is not None:
            head += self.frames.weights(self.embed)
        return 6 * (self.layers * attention + mlps + head)

    @property
    def _head_weights(self) -> int:
        """Numbers in the matrices that each token is multiplied by behind the layers."""
        if self.head is None:
            return self.logit_width * self.vocab + (self.transform is not None) * self.embed**2
        if self.head.pool is not None:
            return 0
        transformed = (self.head.transform is not None) * self.embed**2
        return transformed + self.embed * (self.head.outputs or 0)

    def train_flops_per_token(self, seq_len: int, *, frozen: bool = False) -> int:
        """`flops_per_token` plus attention: 6 head_dim heads per visible key and layer.

        A query sees (seq_len + 1) / 2 keys on average, or w - w (w - 1) / (2 seq_len) of a window
        of w; of a chunk of c, (c + 1) / 2. Not causal, it sees seq_len, or 2 h + 1 - h (h + 1) /
        seq_len with h on each side. 2 matmuls of 2 FLOPs, three times for forward and backward.
        Recomputation is never counted. Of weights that are frozen, for an adapter beside them, no
        gradient is made: 4 FLOPs for each and not 6.
        """
        full, values = self.sees_all.count(True), self.head_dim
        if self.latent is not None:
            values = self.latent.v_dim
        every, local = self._visible(seq_len)
        keys = full * every + (self.layers - full) * local
        weights = self.flops_per_token * (2 if frozen else 3) / 3
        return int(weights + 6 * self.heads * (self.head_dim + values) * keys)

    def _visible(self, seq_len: int) -> tuple[float, float]:
        """Keys that a query sees on average, in layers that see all and in others."""
        seen = seq_len if self.window is None else min(self.window, seq_len)
        chunk = seq_len if self.chunk is None else min(self.chunk, seq_len)
        seen = min(seen, chunk)
        if self.causal:
            return (seq_len + 1) / 2, seen - seen * (seen - 1) / (2 * chunk)
        side = chunk - 1 if self.sides is None else min(self.sides[1], chunk - 1)
        return float(seq_len), min(float(chunk), 2 * side + 1 - side * (side + 1) / chunk)
