"""What training and generation ask of a language model, whatever it is made of."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float


@runtime_checkable
class LanguageModel(Protocol):
    """A model of tokens: embedding, layer stacks, head, and a cache to go on from.

    `Decoder` is one; a model of one's own that has these is trained, cut into stages and served as
    the library's are; generation reads `vocab`, `max_seq` and `eos` of its `config` besides.
    """

    @property
    def embed(self) -> Callable[..., Array] | None:
        """Token ids `[b, s]` to embeddings `[b, s, d]`; None of a model that reads images."""
        ...

    @property
    def stacks(self) -> Mapping[str, Any]:
        """Its layer stacks by name, in the order in which they run."""
        ...

    def hidden(
        self,
        tokens: Any = None,
        *,
        embeddings: Any = None,
        positions: Any = None,
        segments: Any = None,
        mask: Any = None,
    ) -> tuple[Array, dict[str, Any]]:
        """Final hidden states `[b, s, d]`, and what the layers counted, `[layers, ...]` each.

        Args:
            tokens: Ids `[b, s]`; or give `embeddings` in their place.
            embeddings: `[b, s, d]`.
            positions: `[b, s]`; default 0, 1, ... per row.
            segments: `[b, s]`, documents packed into a row; negative is padding.
            mask: Who sees whom; default causal.
        """
        ...

    def head_weight(self) -> Float[Array, "d v"]:
        """The output matrix in the compute dtype: what a loss multiplies chunk by chunk."""
        ...

    def logits(self, hidden: Float[Array, "*lead d"]) -> Float[Array, "*lead v"]:
        """Logits of the hidden states given."""
        ...

    def cache_spec(self, *, seats: int, slots: int, chunk: int | None = None) -> Any:
        """What a cache for `seats` sequences of up to `slots` tokens holds.

        Args:
            seats: Sequences.
            slots: Longest of them.
            chunk: Most tokens of a sequence in one call of `decode`; None: any number.
        """
        ...

    def decode(self, tokens: Any, cache: Any, flat: Any) -> tuple[Float[Array, "t d"], Any]:
        """Final hidden states of flat tokens of any sequences, and the cache with them in it.

        Args:
            tokens: Ids `[t]`.
            cache: Made as `cache_spec` says.
            flat: Where each token belongs, `FlatTokens`.
        """
        ...
