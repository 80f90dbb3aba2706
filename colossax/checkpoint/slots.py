"""Names and regions: which part of which record on disk an array in memory is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from colossax.typing import ParamInfo

Box = tuple[tuple[int, int], ...]
"""Half-open bounds per dim of a record, `((0, 1), (8, 16))`."""

Index = tuple[slice, ...]
"""What a sharding gives each device: one slice per dim of the array in memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySlot:
    """The place of one array in a checkpoint.

    A record is one array on disk. Outside a layer stack it is the array in memory. A stack's record
    is `[total_layers, ...]`, and an array in memory is some of its layers.

    Attributes:
        name: Record, `"<model>/<kind>/<path>"`, such as `"model/params/layers/attn/q/w"`.
        shape: Shape of the record on disk; dim 0 counts layers when `first` is given.
        dtype: Dtype in memory.
        first: First layer the array holds; None outside a stack.
        layers: How many layers the array holds, dim 0 counting them; None when it is one layer
            without that dim, or outside a stack.
        experts: Dim of the record that counts experts, each of which is readable alone; None where
            there are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    first: int | None = None
    layers: int | None = None
    experts: int | None = None

    def __post_init__(self) -> None:
        record_folder(self.name)
        if self.first is None:
            if self.layers is not None:
                raise ValueError(f"{self.name}: layers is given without first")
            return
        stop = self.first + (1 if self.layers is None else self.layers)
        if not self.shape or not 0 <= self.first < stop <= self.shape[0]:
            raise ValueError(
                f"{self.name}: layers {self.first} to {stop} are not within a record of shape "
                f"{self.shape}"
            )

    @property
    def layered(self) -> bool:
        """Whether dim 0 of the record counts layers."""
        return self.first is not None

    @property
    def stacked(self) -> bool:
        """Whether dim 0 of the array in memory counts layers."""
        return self.layers is not None

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of the array in memory."""
        if self.first is None:
            return self.shape
        return self.shape[1:] if self.layers is None else (self.layers, *self.shape[1:])

    def box(self, index: Index | None = None) -> Box:
        """Region of the record that a part of the array is; of all of it by default."""
        if index is None:
            index = (slice(None),) * len(self.array_shape)
        bounds = [
            part.indices(size)[:2] for part, size in zip(index, self.array_shape, strict=True)
        ]
        if self.first is None:
            return tuple(bounds)
        if self.layers is None:
            return ((self.first, self.first + 1), *bounds)
        start, stop = bounds[0]
        return ((self.first + start, self.first + stop), *bounds[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSource:
    """Layers that are read one by one when they are saved, in place of an array.

    Attributes:
        shape: Of the array, its dim of layers first if it has one.
        dtype: Of the array.
        sharding: As an array's, of a single device.
        read: Layer, counted from the first here, to its values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    read: Callable[[int], np.ndarray]

    def content(self, slot: ArraySlot, box: Box) -> np.ndarray:
        """A region of the record that holds it."""
        assert slot.first is not None
        (start, stop), *rest = box
        rows = [
            self.read(layer - slot.first)[box_slices(tuple(rest))] for layer in range(start, stop)
        ]
        return np.stack(rows)


def slot_of(
    info: ParamInfo,
    prefix: str,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype | None = None,
) -> ArraySlot:
    """Slot of a parameter, or of what an optimizer keeps beside it.

    Args:
        info: The parameter.
        prefix: `"<model>/<kind>"`, such as `"model/params"` or `"model/optimizer/0/mu"`.
        shape: Shape in memory where it is not the parameter's (factored moments); a stacked
            parameter's still begins with its layers.
        dtype: Dtype in memory where it is not the parameter's.
    """
    shape = info.shape if shape is None else shape
    name, dtype = f"{prefix}/{info.own_path}", info.dtype if dtype is None else dtype
    experts = _experts_dim(info, shape)
    if info.first_layer is None or info.total_layers is None:
        return ArraySlot(name=name, shape=shape, dtype=dtype, experts=experts)
    each = shape[1:] if info.stacked else shape
    if experts is not None and not info.stacked:
        experts += 1
    return ArraySlot(
        name=name,
        shape=(info.total_layers, *each),
        dtype=dtype,
        first=info.first_layer,
        layers=shape[0] if info.stacked else None,
        experts=experts,
    )


def _experts_dim(info: ParamInfo, shape: tuple[int, ...]) -> int | None:
    """Which dim of an array of this shape counts experts, as the parameter's does."""
    if "experts" not in info.dims:
        return None
    at = info.dims.index("experts")
    return at if shape[: at + 1] == info.shape[: at + 1] else None


def record_folder(name: str) -> str:
    """Folder of a record below the item: `"model/params/layers.attn.q.w"`.

    Records of one `<model>/<kind>` lie side by side, named as Orbax names the leaves of a tree, so
    that Orbax alone can read them too.

    Raises:
        ValueError: The name is not `<model>/<kind>/<path>`.
    """
    parts = name.split("/")
    if len(parts) < 3 or not all(parts) or any(part in (".", "..") for part in parts):
        raise ValueError(f"record '{name}' is not named <model>/<kind>/<path>")
    return "/".join((*parts[:2], ".".join(parts[2:])))


def box_shape(box: Box) -> tuple[int, ...]:
    """Size per dim."""
    return tuple(stop - start for start, stop in box)


def box_slices(box: Box, origin: Box | None = None) -> Any:
    """Slices of a box within the record, or within the array that another box is."""
    if origin is None:
        return tuple(slice(start, stop) for start, stop in box)
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(box, origin, strict=True)
    )


def intersect(a: Box, b: Box) -> Box | None:
    """Common region of two boxes; None when there is none."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None
