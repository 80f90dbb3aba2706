"""Parts of a decoder's attention, as data."""

import dataclasses
import math
from typing import Any

from colossax.config import Count, NotNegative, Positive, check_types
from colossax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Stretches long wavelengths by `factor`, keeps short ones, blends between.

    Attributes:
        factor: Of the wavelength.
        low_freq_factor: Turns within the original positions below which a wave is stretched.
        high_freq_factor: Turns from which on it is kept; where both are one number, nothing is
            between.
        original_max_positions: Of the model before it was stretched.

    Source: the Llama 3.1 model card's configuration (`rope_type: llama3`).
    """

    factor: Positive = 8.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_positions: Count = 8192

    def __post_init__(self):
        check_types(self, "model.rope_scaling")
        if self.high_freq_factor < self.low_freq_factor:
            raise InputError(
                f"model.rope_scaling.high_freq_factor: found {self.high_freq_factor}; give at"
                f" least low_freq_factor, {self.low_freq_factor}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Keeps frequencies that turn often, divides the others by `factor`, blends between.

    Attributes:
        factor: Of the length, over `original_max_positions`.
        original_max_positions: Of the model before it was stretched.
        beta_fast: Turns within those from which on a frequency is kept.
        beta_slow: Turns below which it is divided.
        truncate: Whether the blend begins and ends at whole dims.
        mscale, mscale_all_dim: Cosines and sines are multiplied by the quotient of both magnitudes,
            `0.1 m ln(factor) + 1`; 0: by the magnitude of m = 1. See `softmax_scale` too.
        attention_factor: In place of that multiplier, where given.

    Source: Peng et al. 2023, YaRN; both magnitudes are DeepSeek-V2's.
    """

    factor: Positive
    original_max_positions: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    mscale: NotNegative = 0.0
    mscale_all_dim: NotNegative = 0.0
    attention_factor: Positive | None = None

    def __post_init__(self):
        check_types(self, "model.rope_scaling")
        if self.beta_fast <= self.beta_slow:
            raise InputError(
                f"model.rope_scaling.beta_fast: found {self.beta_fast}; give more than beta_slow,"
                f" {self.beta_slow}"
            )

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_scale(self) -> float:
        """What DeepSeek's attention multiplies its logits by: a magnitude squared, or 1."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """A base that grows with the sequence beyond `original_max_positions` (dynamic NTK).

    The base is `theta (factor n / m - factor + 1)^(d / (d - 2))` for documents of n > m tokens, d
    the dims that turn. n is the highest position of a document plus 1; while tokens are generated,
    that so far.

    Attributes:
        factor: How fast it grows.
        original_max_positions: m.

    Source: `rope_type: dynamic` of Hugging Face's configurations.
    """

    factor: Positive
    original_max_positions: Count

    def __post_init__(self):
        check_types(self, "model.rope_scaling")
        if self.factor < 1:
            raise InputError(
                f"model.rope_scaling.factor: found {self.factor}, with which the base would become"
                " negative; give 1 or more"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongScaling:
    """A divisor for each frequency, of two lists: for short documents and for long (LongRoPE).

    Attributes:
        short: `[dims / 2]`, for documents of up to `original_max_positions` tokens.
        long: For longer ones; where tokens are generated, from the one on that makes it longer.
        original_max_positions: Of the model before it was stretched.
        magnitude: Cosines and sines are multiplied by it.

    Source: Ding et al. 2024, LongRoPE; `rope_type: longrope` of Hugging Face's configurations.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: Count
    magnitude: Positive = 1.0

    def __post_init__(self):
        check_types(self, "model.rope_scaling")
        for name in ("short", "long"):
            found = tuple(float(value) for value in getattr(self, name))
            object.__setattr__(self, name, found)
            if not all(0 < value < math.inf for value in found):
                raise InputError(
                    f"model.rope_scaling.{name}: found {min(found)}; give divisors above 0"
                )
        if len(self.short) != len(self.long):
            raise InputError(
                f"model.rope_scaling: {len(self.short)} divisors for short documents and"
                f" {len(self.long)} for long ones; give as many of each"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation).

    Source: Chen et al. 2023, Extending Context Window of Large Language Models.
    """

    factor: Positive

    def __post_init__(self):
        check_types(self, "model.rope_scaling")


RopeScaling = Llama3Scaling | YarnScaling | DynamicScaling | LongScaling | LinearScaling
"""How the frequencies of a rotary embedding were stretched; see `RopeConfig.scaled`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Base and scaling.

    Attributes:
        theta: Base of the frequencies.
        linear_factor: Divides every frequency (position interpolation).
        llama3: Llama 3's scaling.
        yarn: Or YaRN's.
        dynamic: Or one that depends on the length.
        long: Or LongRoPE's, which does too.
        dims: Of a head, how many turn, the first; the others have no position. None: all.
        interleaved: Pairs that turn together are neighbours; else a half of those dims is apart.
        sections: Pairs that turn by each axis of a position, one axis after another, as time,
            height and width; None: positions have one axis.
        restart: Frequencies of each axis begin anew; else they go on from axis to axis.
    """

    theta: Positive = 10_000.0
    linear_factor: Positive = 1.0
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None
    dynamic: DynamicScaling | None = None
    long: LongScaling | None = None
    dims: Count | None = None
    interleaved: bool = False
    sections: tuple[Count, ...] | None = None
    restart: bool = False

    def __post_init__(self):
        check_types(self, "model.rope")
        self._check_sections()
        found = [name for name in _SCALINGS.values() if getattr(self, name) is not None]
        if len(found) > 1:
            raise InputError(
                f"model.rope: found {' and '.join(found)}, two scalings; give one of them"
            )
        if self.yarn is not None and self.theta <= 1:
            raise InputError(
                f"model.rope.theta: found {self.theta}, with which YaRN's scaling finds no dims to"
                " stretch; give more than 1"
            )

    def _check_sections(self) -> None:
        if self.sections is None:
            if self.restart:
                raise InputError(
                    "model.rope.restart: frequencies begin anew for each of several axes, and there"
                    " is one; give sections, or leave it out"
                )
            return
        if self.stretched_from is not None:
            raise InputError(
                "model.rope.sections: a scaling that depends on the length goes with positions of"
                " one axis; leave one of them out"
            )
        if self.restart and len(set(self.sections)) > 1:
            raise InputError(
                f"model.rope.sections: found {self.sections}, and frequencies that begin anew are"
                " as many for each axis; give equal numbers"
            )

    @classmethod
    def scaled(cls, theta: float, scaling: RopeScaling | None, **fields: Any) -> "RopeConfig":
        """With a scaling of any form.

        Args:
            theta: Base of the frequencies.
            scaling: Or none.
            **fields: The others.
        """
        if isinstance(scaling, LinearScaling):
            return cls(theta=theta, linear_factor=scaling.factor, **fields)
        if scaling is not None:
            fields[_SCALINGS[type(scaling)]] = scaling
        return cls(theta=theta, **fields)

    @property
    def stretched_from(self) -> int | None:
        """Tokens of a document above which frequencies depend on its length; None: they do not."""
        scaling = self.dynamic or self.long
        return None if scaling is None else scaling.original_max_positions

    def turned(self, head_dim: int) -> int:
        """How many of so many dims turn.

        Raises:
            InputError: Not all that `dims` says are there, they are odd or too few, or a list of
                divisors has another length.
        """
        dims = self.dims or head_dim
        if dims > head_dim or dims % 2:
            raise InputError(
                f"model.rope: rope turns pairs of a head's dims, and {dims} of head_dim {head_dim}"
                " are to turn; choose an even number of them"
            )
        if self.sections is not None and 2 * sum(self.sections) != dims:
            raise InputError(
                f"model.rope.sections: {self.sections} are {sum(self.sections)} pairs of dims, and"
                f" {dims // 2} turn; give as many"
            )
        if self.dynamic is not None and dims < 4:
            raise InputError(
                "model.rope_scaling: a base that grows with the length needs two frequencies or"
                f" more, and {dims} dims turn; let 4 or more"
            )
        if self.long is not None and len(self.long.short) != dims // 2:
            raise InputError(
                f"model.rope_scaling: {len(self.long.short)} divisors for {dims // 2} frequencies;"
                " give one for each"
            )
        return dims


_SCALINGS: dict[type, str] = {
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
    DynamicScaling: "dynamic",
    LongScaling: "long",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: keys and values of all heads are made from one vector a token.

    Attributes:
        kv_rank: Width of what keys and values are made from.
        q_rank: Likewise of queries; None: they are made from the residual stream.
        nope_dim: Of a head's queries and keys, what is made for the head and has no position.
        rope_dim: Of those, what is turned by position; that of keys is one for all heads.
        v_dim: Width of a head's values.
        scale: Times which logits are taken, beside 1 / sqrt(nope_dim + rope_dim).

    Source: DeepSeek-AI 2024, DeepSeek-V2.
    """

    kv_rank: Count
    q_rank: Count | None = None
    nope_dim: Count
    rope_dim: Count
    v_dim: Count
    scale: Positive = 1.0

    def __post_init__(self):
        check_types(self, "model.latent")
        if self.rope_dim % 2:
            raise InputError(
                f"model.latent.rope_dim: rope turns pairs of dims, found {self.rope_dim}; choose an"
                " even one"
            )

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.nope_dim + self.rope_dim

    def weights(self, embed: int, heads: int) -> int:
        """Numbers in the matrices of an attention block."""
        into = self.q_rank or embed
        queries = into * heads * self.head_dim + (embed * self.q_rank if self.q_rank else 0)
        keys = embed * (self.kv_rank + self.rope_dim)
        keys += self.kv_rank * heads * (self.nope_dim + self.v_dim)
        return queries + keys + heads * self.v_dim * embed


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """Queries times `1 + scale ln(1 + floor((position + 1) / step))`, for layers without rope.

    Source: Nakanishi 2025, Scalable-Softmax; in this form the configuration of Llama 4.
    """

    scale: Positive = 0.1
    step: Count = 8192

    def __post_init__(self):
        check_types(self, "model.query_growth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeConfig:
    """A learned number for each head and bucket of distances, added to scores of all layers.

    Where tokens see both sides, half of the buckets are for keys behind a query. Of those of a
    side the first half hold one distance each, the others grow as its logarithm.

    Attributes:
        buckets: How many: an even number, of four or more for each side.
        farthest: Distance from which on all are in a side's last bucket.

    Source: Raffel et al. 2020, T5.
    """

    buckets: Count = 32
    farthest: Count = 128

    def __post_init__(self):
        check_types(self, "model.relative")

    def of_side(self, causal: bool) -> int:
        """Buckets of one side.

        Raises:
            InputError: They cannot be halved, or all distances have one of their own.
        """
        sides = 1 if causal else 2
        each = self.buckets // sides
        if self.buckets % (2 * sides) or self.farthest <= each // 2:
            raise InputError(
                f"model.relative: {self.buckets} buckets for {sides} sides and distances up to"
                f" {self.farthest} found; give a multiple of {2 * sides}, and farthest above"
                f" {each // 2}"
            )
        return each
