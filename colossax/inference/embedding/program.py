"""The compiled step of an embedder: rows of texts, one behind another, to a vector of each."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.inference.embedding.heads import tells_of_texts
from colossax.inference.plan import encoding_plan, shapes_of
from colossax.nn import DecoderConfig, ModelSpec
from colossax.sharding import batch_axes, replicated, use
from colossax.typing import Params

TOKENS = 512
"""Tokens of a row where many texts wait, where nobody says."""

FEWER = (16, 4)
"""So many times shorter are the rows of steps with less to read."""

SHORT, MOST = 4, 256
"""A row has room for texts of so few tokens each, and for so many texts."""


class EmbeddingProgram:
    """`step(params, packed) -> vectors` for a few sizes of rows; it keeps no parameters.

    Rows are as many as the plan splits a batch into, so that replicas share the work.

    Cost: a compilation for each size, at first use: four at most.
    """

    def __init__(self, spec: ModelSpec, bound: BoundPlan, *, tokens: int, longest: int | None):
        """Compile nothing yet.

        Args:
            spec: The model, as `describe` gave it under `bound`.
            bound: Where the parameters live.
            tokens: Of a row where many texts wait.
            longest: Text that is read; None: what the model can.

        Raises:
            InputError: The model tells no embeddings, or a size is none.
        """
        config = embedding_config(spec)
        self.spec, self.config = spec, config
        self.bound = BoundPlan(encoding_plan(bound.plan), bound.mesh)
        self.longest = _longest(config, longest)
        if tokens < 1:
            raise InputError(f"tokens: found {tokens}; give 1 or more")
        self.sizes = sizes_of(tokens, self.longest)
        self.usual = tokens
        self.documents = {size: min(MOST, max(1, size // SHORT)) for size in self.sizes}
        mesh = self.bound.mesh.shape
        self.rows = math.prod(mesh[axis] for axis in batch_axes(self.bound))
        assert config.head is not None
        self.width = config.head.outputs or config.head.pooled * config.embed
        here = replicated(self.bound)
        self.placed = functools.partial(jax.device_put, device=here)
        self._steps = {
            size: jax.jit(functools.partial(step, spec, self.bound, documents), out_shardings=here)
            for size, documents in self.documents.items()
        }

    @property
    def compiled(self) -> int:
        """How many programs there are by now."""
        steps: dict[int, Any] = self._steps
        return sum(jitted._cache_size() for jitted in steps.values())

    def packed(self, size: int, rows: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
        """Texts of a step as its array, `[3, rows, size]` int32; see `step`."""
        packed = np.zeros((3, self.rows, size), np.int32)
        ids, positions, segments = packed
        segments[:] = -1
        for at, texts in enumerate(rows):
            start = 0
            for number, text in enumerate(texts):
                end = start + len(text)
                ids[at, start:end] = text
                positions[at, start:end] = np.arange(len(text), dtype=np.int32)
                segments[at, start:end] = number
                start = end
        return packed

    def __call__(self, params: Params, packed: np.ndarray) -> Array:
        """Run a step; see `step`."""
        return self._steps[packed.shape[-1]](params, self.placed(packed))

    def traced(self, size: int, params: Params) -> Any:
        """A step that is not compiled.

        Args:
            size: One of `sizes`.
            params: Arrays, or shapes.
        """
        here = replicated(self.bound)
        given = jax.ShapeDtypeStruct((3, self.rows, size), jnp.int32, sharding=here)
        return self._steps[size].trace(params, given)


def step(
    spec: ModelSpec,
    bound: BoundPlan,
    documents: int,
    params: Params,
    packed: Int[Array, "three r s"],
) -> Float[Array, "r k w"]:
    """A vector of each text of each row; pure.

    Args:
        spec, bound: Of the program.
        documents: Most texts of a row, k; rows of vectors that no text has are anything.
        params: Of the model.
        packed: Token ids, positions in their texts, and numbers of those in their rows, negative
            for what fills rows up.

    Cost: of all tokens of the rows; a token attends to those of its own text alone.
    """
    ids, positions, segments = packed
    model = spec.merge(params)
    # Texts are no longer than the model can, rows of several are.
    model.config = dataclasses.replace(
        model.config, max_seq=max(model.config.max_seq, ids.shape[1])
    )
    with use(bound):
        hidden, _ = model.hidden(ids, positions=positions, segments=segments)
        return model.told(hidden, segments=segments, documents=documents)


def sizes_of(tokens: int, longest: int) -> tuple[int, ...]:
    """Tokens of rows, ascending: of few texts, of many, and of the longest text."""
    fewer = (tokens // share for share in FEWER)
    sizes = {*(size for size in fewer if size >= SHORT), tokens, max(tokens, longest)}
    return tuple(sorted(sizes))


def embedding_config(spec: ModelSpec) -> DecoderConfig:
    """Sizes of a model that tells embeddings of texts, or what else its head makes of one.

    Raises:
        InputError: It does not.
    """
    model = spec.merge(shapes_of(spec))
    config = getattr(model, "config", None)
    head = getattr(config, "head", None)
    if not isinstance(config, DecoderConfig) or not tells_of_texts(head):
        told = "logits of a vocabulary" if head is None else f"{head}"
        raise InputError(
            f"model: it tells {told} and no embeddings; open it with"
            " open_checkpoint(...).embedding(pool='mean'), or give its configuration a head, as"
            " HeadConfig(pool='mean', normalise=True)"
        )
    if config.patches is not None or not config.vocab:
        raise InputError("model: it reads images, and an embedder texts; give a model of tokens")
    return config


def _longest(config: DecoderConfig, longest: int | None) -> int:
    if longest is None:
        return config.max_seq
    if not 0 < longest <= config.max_seq:
        raise InputError(
            f"longest: found {longest}, but the model's longest sequence is {config.max_seq}; give"
            f" 1 to {config.max_seq}"
        )
    return longest
