"""A drafter of a frozen model, as data."""

import dataclasses
from typing import Annotated, Any

from colossax.config import Count, Natural, Share, check_types, within
from colossax.errors import InputError
from colossax.nn.config.decoder import DecoderConfig
from colossax.nn.config.pair import EncoderDecoderConfig
from colossax.nn.config.seeing import SeeingConfig

BlockTokens = Annotated[int, within(1, 64)]
"""Tokens that are drafted from one state of the target."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A small decoder that tells what a target will say, and reads what the target has seen.

    Each layer attends to its own tokens, then to keys and values of the target's last layer, and
    has an MLP. Embedding, head and what it attends to are the target's own, which is frozen.

    Attributes:
        layers: How many; 0: there is no drafter.
        heads: Of queries, of both attentions; None: as many as the target has. The target's heads
            of keys and values divide them.
        mlp: Width of the MLP's hidden layer; None: as wide as the target's.
        block: Tokens that it learns to draft from one state of the target.
        text: Share of the loss that is cross entropy to the text; the rest is the divergence from
            what the target tells.

    Source: Du et al. 2024, GliDe with a CaPE.
    """

    layers: Natural = 0
    heads: Count | None = None
    mlp: Count | None = None
    block: BlockTokens = 4
    text: Share = 0.0

    def __post_init__(self):
        check_types(self, "drafter")

    def __bool__(self) -> bool:
        return self.layers > 0

    def decoder(self, target: DecoderConfig) -> DecoderConfig:
        """Its sizes beside a target.

        Args:
            target: Sizes of that.

        Raises:
            InputError: Heads do not fit the target's, or its keys and values cannot be read.
        """
        check_target(target)
        heads = target.heads if self.heads is None else self.heads
        if heads % target.kv_heads:
            raise InputError(
                f"drafter.heads: found {heads}, and the target's {target.kv_heads} heads of keys"
                f" and values do not divide them; give a multiple of {target.kv_heads}"
            )
        names = ("vocab", "kv_heads", "head_dim", "max_seq", "norm", "norm_eps", "norm_bias")
        names += ("norm_from_one", "activation", "gated", "rope", "alibi", "alibi_scale")
        names += ("learned_positions", "position_offset", "embed_norm", "init_std", "eos")
        return DecoderConfig(
            **{name: getattr(target, name) for name in names},
            embed=target.logit_width,
            layers=self.layers,
            heads=heads,
            mlp=target.mlp if self.mlp is None else self.mlp,
        )


def check_target(target: DecoderConfig) -> None:
    """Refuse a model whose last layer has no keys and values of all tokens before a token.

    Raises:
        InputError: Names the part that stands in the way.
    """
    full = target.sees_all[-1]
    found = {
        "latent": target.latent is not None,
        "window": target.window is not None and not full,
        "chunk": target.chunk is not None and not full,
        "relative": target.relative is not None,
        "longest_source": target.longest_source is not None,
        "patches": target.patches is not None,
        "head": target.head is not None,
        "causal off": not target.causal,
    }
    odd = [name for name, there in found.items() if there]
    if odd:
        raise InputError(
            f"drafter.layers: the target has {', '.join(odd)}, and a drafter reads keys and values"
            " that its last layer keeps of all tokens; give a decoder whose last layer keeps them,"
            " or leave the drafter out"
        )


def check_family(model: Any) -> None:
    """Refuse a family of models that has no drafters.

    Args:
        model: Configuration of a family.

    Raises:
        InputError: It is no decoder of text alone.
    """
    if isinstance(model, EncoderDecoderConfig | SeeingConfig) or hasattr(model, "image_encoder"):
        raise InputError(
            f"drafter.layers: the target is a {type(model).__name__.removesuffix('Config')}, which"
            " reads something beside its own tokens; drafters are of decoders of text, so give one,"
            " or leave the drafter out"
        )
