"""What stands behind the layers: a transform of hidden states, and answers of tokens or rows."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from colossax.errors import InputError
from colossax.nn.block import ACTIVATIONS
from colossax.nn.config import DecoderConfig, HeadConfig, TransformConfig
from colossax.nn.decoder.attention_pool import AttentionPool
from colossax.nn.decoder.layers import make_norm
from colossax.nn.layers import Linear
from colossax.nn.module import MakeModel
from colossax.sharding import constrain, current_order, gather_weight

OWN_HEAD = "answers"
"""Name of a model's part that `HeadConfig` is of."""

OF_VOCABULARY = ("head", "head_bias", "transform", "out_of")
"""Names of its parts, in place of that, that logits of a vocabulary are made by."""


class Transform(nnx.Module):
    """`norm(act(x @ w + b))`, as wide as x."""

    def __init__(self, config: DecoderConfig, transform: TransformConfig, *, rngs: nnx.Rngs):
        self.activation = transform.activation
        self.map = Linear(
            (config.embed, config.embed),
            ("embed", "width"),
            rngs=rngs,
            bias=transform.bias,
            std=config.init_std,
        )
        self.norm = make_norm(config) if transform.norm else None

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        y = ACTIVATIONS[self.activation](self.map(x))
        return y if self.norm is None else self.norm(y)


class Head(nnx.Module):
    """Answers in place of logits of a vocabulary, see `HeadConfig`."""

    def __init__(self, config: DecoderConfig, head: HeadConfig, *, rngs: nnx.Rngs):
        self.head = head
        self.query = AttentionPool(config, rngs=rngs) if head.pool == "attention" else None
        self.transform = (
            None if head.transform is None else Transform(config, head.transform, rngs=rngs)
        )
        self.map = (
            None
            if head.outputs is None
            else Linear(
                (head.pooled * config.embed, head.outputs),
                ("embed", "outputs"),
                rngs=rngs,
                bias=head.bias,
                std=config.init_std,
            )
        )

    def __call__(
        self, hidden: Float[Array, "b s d"], segments: Any, documents: int
    ) -> Float[Array, "b n o"]:
        """Of each token, or of the documents of each row; float32.

        Raises:
            InputError: A learned query is to read a part of a row alone.
        """
        if self.query is not None:
            if segments is not None or documents != 1:
                raise InputError(
                    "model.head.pool: 'attention' reads whole rows, and documents of them are"
                    " asked for; leave segments out, or give another pool"
                )
            hidden = self.query(hidden)
        elif self.head.pool is not None:
            hidden = pooled(hidden, self.head.pool, segments, documents)
        if self.transform is not None:
            hidden = self.transform(hidden)
        told = hidden.astype(jnp.float32) if self.map is None else self._mapped(hidden)
        if self.head.normalise:
            told = told / jnp.sqrt(jnp.sum(told * told, axis=-1, keepdims=True) + 1e-12)
        return told

    def _mapped(self, hidden: Float[Array, "b n d"]) -> Float[Array, "b n o"]:
        """Outputs are few: each device has them all, and sums are not rounded to 16 bits."""
        assert self.map is not None
        weight = self.map.weight.gathered(to=(None, None))
        told = jnp.dot(hidden, weight, preferred_element_type=jnp.float32)
        if self.map.b is None:
            return told
        return told + gather_weight(self.map.b[...], ("outputs",), dtype=jnp.dtype("float32"))


def with_new_head(make_model: MakeModel) -> MakeModel:
    """A factory of the same model, whose `HeadConfig` a checkpoint need not know.

    A run that starts from a checkpoint without such a head draws one; where it has one, that is
    taken. Beside an adapter (`with_adapter` of what this returns) it learns as a whole, and
    checkpoints hold it.

    Args:
        make_model: Of a model with a head of its own.

    Raises:
        InputError: When built: it tells logits of a vocabulary.
    """

    def built(rngs: nnx.Rngs) -> nnx.Module:
        model = make_model(rngs)
        head = getattr(model, OWN_HEAD, None)
        if head is None:
            raise InputError(
                "with_new_head: the model has no head but that of its vocabulary; give its"
                " configuration a head, as HeadConfig(outputs=1, pool='last')"
            )
        for _, node in nnx.iter_graph(head):
            if isinstance(node, nnx.Param):
                node.set_metadata(of_adapter=True, inside=0)
        return model

    return built


def pooled(
    hidden: Float[Array, "b s d"],
    pool: str,
    segments: Int[Array, "b s"] | None = None,
    documents: int = 1,
) -> Float[Array, "b k w"]:
    """A hidden state of each document of a row: of its first token, its last, or their mean.

    Or two, one behind the other: see `POOLS`.

    Each is a sum over the row with weights of its tokens, so that devices which share the row add
    up their parts. Documents that are not there have zeros.

    Args:
        hidden: Of tokens, in the order in which rows lie.
        pool: A key of `POOLS`.
        segments: Number of each token's document, negative is padding; None: a row is one.
        documents: How many of a row are asked for, k: those numbered below it.

    Cost: 2 b k s d FLOPs; where a row is split, a sum of b k d numbers.
    """
    where = current_order().indices(hidden.shape[1])
    if segments is None:
        segments = jnp.zeros(hidden.shape[:2], jnp.int32)
    own = segments[:, None, :] == jnp.arange(documents)[:, None]
    last = where == jnp.max(jnp.where(own, where, -1), axis=-1, keepdims=True)
    first = where == jnp.min(jnp.where(own, where, len(where)), axis=-1, keepdims=True)
    chosen = {
        "first": (own & first,),
        "last": (own & last,),
        "mean": (own,),
        "first_mean": (own & first, own & ~first),
    }[pool]
    means = {"mean": 0, "first_mean": 1}
    states = [
        _weighted(hidden, tokens, mean=means.get(pool) == at) for at, tokens in enumerate(chosen)
    ]
    return constrain(jnp.concatenate(states, axis=-1), "batch", None, "embed")


def _weighted(
    hidden: Float[Array, "b s d"], tokens: Bool[Array, "b k s"], *, mean: bool
) -> Float[Array, "b k d"]:
    """The sum of the states of these tokens, or their mean."""
    weights = constrain(tokens.astype(hidden.dtype), "batch", None, "seq")
    found = jnp.einsum("bks,bsd->bkd", weights, hidden, preferred_element_type=jnp.float32)
    if mean:
        found = found / jnp.maximum(jnp.sum(tokens, axis=-1, keepdims=True), 1)
    return found.astype(hidden.dtype)


def check_vocabulary(config: DecoderConfig) -> None:
    """Refuse logits of a model that tells something else.

    Raises:
        InputError: It has a head of its own.
    """
    if config.head is not None:
        raise InputError(
            f"model.head: {config.head} stands where logits of the vocabulary are asked for, so it"
            " writes no text; give a language model, or use the loss of such a head"
        )
