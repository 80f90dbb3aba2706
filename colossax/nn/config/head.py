"""What a model makes of its hidden states, as data."""

import dataclasses

from colossax.config import Count, check_types, nearest
from colossax.errors import InputError

ACTIVATION_NAMES = ("silu", "relu", "gelu", "gelu_tanh", "quick_gelu", "tanh")
"""Keys of `nn.ACTIVATIONS`."""

POOLS = {
    "first": "the first token of a document",
    "last": "its last one",
    "mean": "the mean of all",
    "attention": "what a learned query reads of all, and an MLP beside it",
    "first_mean": "the first token's, and behind it the mean of the others: twice as wide",
}
"""What a document's hidden state is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformConfig:
    """`norm(act(x @ w + b))`, as wide as it came: what BERT has before its head.

    Attributes:
        activation: A key of `nn.ACTIVATIONS`.
        bias: Whether the map has one.
        norm: Whether what it gives is normed, as the model's layers norm.
    """

    activation: str = "gelu"
    bias: bool = True
    norm: bool = True

    def __post_init__(self):
        check_types(self, "model.transform")
        if self.activation not in ACTIVATION_NAMES:
            raise InputError(
                f"model.transform.activation: '{self.activation}' is"
                f" unknown{nearest(self.activation, ACTIVATION_NAMES)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What is told of tokens or of documents, in place of logits of the vocabulary.

    Hidden states are pooled, transformed, mapped and normalised, in this order; each may be left
    out. Classes of documents are `HeadConfig(outputs=3, pool="first")`, those of tokens
    `HeadConfig(outputs=9)`, a reward `HeadConfig(outputs=1, pool="last", bias=False)`, a value of
    each token `HeadConfig(outputs=1)`, an embedding `HeadConfig(pool="mean", normalise=True)`.

    Attributes:
        outputs: Numbers that are told, as classes; None: the hidden state itself, as wide as it is.
        pool: A key of `POOLS`: one answer for each document; None: one for each token.
        transform: Of what is pooled; None: there is none.
        bias: Whether the map to the outputs has one.
        normalise: What is told is divided by its root of summed squares.
    """

    outputs: Count | None = None
    pool: str | None = None
    transform: TransformConfig | None = None
    bias: bool = True
    normalise: bool = False

    def __post_init__(self):
        check_types(self, "model.head")
        if self.pool is not None and self.pool not in POOLS:
            raise InputError(
                f"model.head.pool: '{self.pool}' is unknown{nearest(self.pool, POOLS)}"
            )
        if self.pool == "first_mean" and self.transform is not None:
            raise InputError(
                "model.head.transform: it is as wide as one hidden state, and pool 'first_mean'"
                " gives two; leave one of them out"
            )

    @property
    def pooled(self) -> int:
        """How many hidden states wide a document's is."""
        return 2 if self.pool == "first_mean" else 1
