"""Types that cross room doors."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from colossax.config import Placement

Dims = tuple[str | None, ...]
"""Logical names of an array's dims, outermost first; None is a dim nobody shards."""


class NamedDims(tuple):
    """Dims that know whose they are, for what is chosen by path.

    Attributes:
        path: Of the parameter.
    """

    path: str

    def __new__(cls, path: str, dims: Dims) -> "NamedDims":
        """The same names, with a path."""
        self = super().__new__(cls, dims)
        self.path = path
        return self


Params = dict[str, Any]
"""Nested dict of arrays; leaves are `jax.Array`."""

Batch = dict[str, Any]
"""Named arrays of one global batch; for text see `TEXT_BATCH_DIMS`."""

TrainState = dict[str, Any]
"""`step params opt_state variables rng skipped`, plain dicts of arrays; `loss_scale` too where the
plan scales the loss."""

Metrics = dict[str, jax.Array]
"""Float32 scalars of one step, still on the device."""

TEXT_BATCH_DIMS: dict[str, Dims] = dict.fromkeys(
    ("tokens", "targets", "segments", "positions", "weights"), ("batch", "seq")
)
"""Segments number the documents of a row from its start, so they never fall along it; -1, padding,
may stand anywhere."""

TOKEN_TYPES = "token_types"
"""Array of a batch of text that few models ask for: the kind of each token, `[b, s]`."""

TOKEN_VALUES = "token_values"
"""Array of what a head is to tell of each token, `[b, s]`, as of values."""

PIXELS = "pixels"
"""Array of a batch of images, `[b, height, width, channels]`, for models that read patches; beside
tokens `[b, images, height, width, channels]`."""

FRAMES = "frames"
"""Array of sound that an encoder reads, `[b, frames, mels]`."""

MATCHES = "matches"
"""Array of a batch of images and texts that is evaluated: of each image the row of its text."""

SOURCE, SOURCE_SEGMENTS = "source", "source_segments"
"""Arrays of what an encoder reads before a decoder writes: tokens and their documents, `[b, t]`."""

TOKEN_DIMS = TEXT_BATCH_DIMS | dict.fromkeys(
    (TOKEN_TYPES, TOKEN_VALUES, SOURCE, SOURCE_SEGMENTS), ("batch", "seq")
)
"""Dims of all arrays that have a number for each token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """What one parameter leaf is, independent of where it lives.

    Attributes:
        path: Name without segments, `"layers/attn/q/w"`; the key on disk and in errors.
        dims: One logical name per array dim; a stacked leaf begins with `"layers"`.
        shape: Shape of the array in memory.
        dtype: Dtype of the array in memory.
        first_layer: First global layer the leaf holds; None outside a layer stack.
        total_layers: Layers of the whole stack; None outside a layer stack.
        span: Numbers of its first and last layer among those of all kinds and stacks, in the order
            in which the model made them; None outside a layer stack.
        segment: Path of the layer stack and number of its segment; None outside a layer stack.
        placement: Of its layer; on the device outside a layer stack.
        resident: Whether parameter and optimizer state stay on the device all the same (vectors
            do: they are small). On disk a layer's state is one record, vectors and all; the CPU
            updates all of a layer.
        model: Name of its model where there are several, the first part of `path`.
        learns: Whether it ever gets a gradient and optimizer state.
        own_dtype: Dtype at rest whatever the plan; None: `precision.params`.
        stood_at: Its path before `with_weights` put it where it is, as a part of another weight;
            empty for a part that is new, None for any other parameter.
        update: Its own rule in place of the optimizer, `(value, gradient) -> value`, of one layer.
        noted: Whether it is no parameter of the model but what is noted of a step: of gradients of
            microbatches the largest counts, and checkpoints hold it apart.
        of_base: Whether it is of a model that an adapter learns beside: checkpoints leave it out.
        quantised: What it is of a matrix that is kept in codes, see `nn/quantised/codes.py`.
        behind: Outside a layer stack, whether it was made after the one that its model has.
    """

    path: str
    dims: Dims
    shape: tuple[int, ...]
    dtype: np.dtype
    first_layer: int | None = None
    total_layers: int | None = None
    span: tuple[int, int] | None = None
    segment: tuple[str, int] | None = None
    placement: Placement = Placement()
    resident: bool = False
    model: str | None = None
    learns: bool = True
    own_dtype: np.dtype | None = None
    stood_at: str | None = None
    update: Callable[[Any, Any], Any] | None = None
    noted: bool = False
    of_base: bool = False
    quantised: Any = None
    behind: bool = False

    def at_rest(self, params: Any) -> np.dtype:
        """Dtype at rest under a plan whose `precision.params` this is."""
        return np.dtype(params) if self.own_dtype is None else self.own_dtype

    @property
    def numbers(self) -> int:
        """Numbers of the model that it holds: of codes those that they stand for."""
        if self.quantised is None:
            return math.prod(self.shape)
        return self.quantised.numbers * max(1, self.layer_count)

    @property
    def named_dims(self) -> NamedDims:
        """Its dims, with its path."""
        return NamedDims(self.path, self.dims)

    @property
    def own_path(self) -> str:
        """Path within its model."""
        return self.path if self.model is None else self.path[len(self.model) + 1 :]

    @property
    def on_host(self) -> bool:
        """Whether the parameter is in host memory."""
        there = self.placement.params_on_host or self._with_experts
        return there and not self.resident

    @property
    def optimizer_on_host(self) -> bool:
        """Whether its optimizer state is in host memory, or would be where it is not in a file."""
        there = self.placement.optimizer_off_device or self._with_experts
        return there and not self.resident

    @property
    def _with_experts(self) -> bool:
        return self.placement.experts_on_host and "experts" in self.dims

    def on_device(self) -> "ParamInfo":
        """The same, all of it on the device."""
        return dataclasses.replace(self, placement=Placement())

    @property
    def stacked(self) -> bool:
        """Whether dim 0 of the array counts layers."""
        return self.first_layer is not None and bool(self.dims) and self.dims[0] == "layers"

    @property
    def layer_count(self) -> int:
        """Layers held by the leaf: 0 outside a stack, 1 for an unstacked layer."""
        if self.first_layer is None:
            return 0
        return self.shape[0] if self.stacked else 1
