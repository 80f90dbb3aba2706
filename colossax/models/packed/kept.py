"""The codes of a folder, written beside the floats that they stand for."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from colossax.checkpoint import RecordWriter
from colossax.models.conversion import Tensor
from colossax.models.hf_folder import Source
from colossax.models.packed.matrix import PackedMatrix
from colossax.models.parameters import CODES_PREFIX
from colossax.nn.quantised.grid import CODES, GROUPS, SCALES, ZEROS, Grid

_MATRIX = "/w"
_HALF_A_BYTE = 4


class KeptCodes:
    """Codes of the maps of layers which are in codes in every layer, as `Grid` has them.

    Floats alone have: maps that some layers have in floats, experts, and what is outside of layers.
    So have those of four bits and an odd number of inputs.

    Cost: a matrix in codes is read and unpacked twice, once for its numbers; a byte for each
    number, twice, is in memory.
    """

    def __init__(self, source: Source, writer: RecordWriter):
        """Announce the records; of the folder what says which group an input is in is read.

        Args:
            source: The folder.
            writer: Of the checkpoint.
        """
        self._source, self._writer = source, writer
        found: dict[str, set[Grid | None]] = {}
        for tensor in source.tensors:
            grid = self._grid(tensor)
            for info in tensor.infos:
                found.setdefault(info.path, set()).add(grid)
        common = {path: _of_all(grids) for path, grids in found.items()}
        self._grids = {path: grid for path, grid in common.items() if grid is not None}
        for tensor in source.tensors:
            if tensor.layer == 0:
                self._declare(tensor)

    def _declare(self, tensor: Tensor) -> None:
        for at, info in enumerate(tensor.infos):
            if (grid := self._grids.get(info.path)) is None:
                continue
            inputs, *outs = _shape(tensor, at)
            for name, (shape, dtype) in grid.parts(inputs, outs).items():
                whole = (info.total_layers or 1, *shape)
                self._writer.declare(_record(info.path, name), whole, dtype, layered=True)

    def _grid(self, tensor: Tensor) -> Grid | None:
        """Of one matrix."""
        packed = self._source.packed.get(tensor.name)
        in_layers = all(i.first_layer is not None and "experts" not in i.dims for i in tensor.infos)
        if not isinstance(packed, PackedMatrix) or not in_layers or not _in_order(tensor):
            return None
        if not all(info.path.endswith(_MATRIX) for info in tensor.infos):
            return None
        if tensor.shape[1] * packed.bits % 8:
            return None
        return Grid(
            bits=packed.bits,
            floats=packed.floats,
            scales=packed.dtype.name,
            groups=packed.groups,
            zeros=packed.with_zeros,
            ordered=packed.ordered(),
        )

    def write(self, tensor: Tensor) -> None:
        """Write those of a tensor, where they are kept."""
        grids = [self._grids.get(info.path) for info in tensor.infos]
        packed = self._source.packed.get(tensor.name)
        if not isinstance(packed, PackedMatrix) or not any(grids):
            return
        parts = _parts(tensor, packed)
        for at, (info, grid) in enumerate(zip(tensor.infos, grids, strict=True)):
            if grid is None:
                continue
            for name in grid.dims(None, ()):
                array = np.ascontiguousarray(parts[name][at])
                self._writer.write(_record(info.path, name), array, tensor.layer)


def _parts(tensor: Tensor, packed: PackedMatrix) -> dict[str, list[np.ndarray]]:
    """All that a grid may have, of each parameter."""
    found = packed.codes()
    zeros, groups = found.zeros, found.scales.shape
    if isinstance(zeros, int):
        zeros = np.full(groups, zeros, np.int8 if packed.floats else np.uint8)
    codes = _ours(tensor, found.codes, tensor.shape[1])
    if packed.bits == _HALF_A_BYTE:
        codes = [one[0::2] | one[1::2] << 4 for one in codes]
    return {
        CODES: codes,
        SCALES: _ours(tensor, found.scales, groups[1]),
        ZEROS: _ours(tensor, zeros, groups[1]),
        GROUPS: [found.of.astype(np.int32)] * len(codes),
    }


def _record(path: str, part: str) -> str:
    return f"{CODES_PREFIX}/{path}/{part}"


def _of_all(grids: Iterable[Grid | None]) -> Grid | None:
    """Of all layers: where some have zeros, or inputs in another order, all do."""
    known = [grid for grid in grids if grid is not None]
    alike = {dataclasses.replace(grid, zeros=False, ordered=False) for grid in known}
    if len(alike) != 1 or None in grids:
        return None
    return dataclasses.replace(
        alike.pop(),
        zeros=any(grid.zeros for grid in known),
        ordered=any(grid.ordered for grid in known),
    )


def _inputs(tensor: Tensor) -> tuple[str, ...]:
    """Names of the dims that a foreign matrix `[out, in]` has last."""
    return tensor.layout.groups[-1]


def _in_order(tensor: Tensor) -> bool:
    """Whether its inputs are ours, in our order."""
    return tensor.dims[: len(_inputs(tensor))] == _inputs(tensor)


def _shape(tensor: Tensor, at: int) -> tuple[int, ...]:
    """Of a parameter, its inputs as one."""
    return (tensor.shape[-1], *tensor.shapes[at][len(_inputs(tensor)) :])


def _ours(tensor: Tensor, foreign: np.ndarray, inputs: int) -> list[np.ndarray]:
    """What is `[out, inputs]` as our parameters have it, `[inputs, *outs]`.

    Args:
        tensor: The matrix.
        foreign: Its codes, or what its groups have.
        inputs: How many there are, or groups.
    """
    first, *others = _inputs(tensor)
    sizes = tensor.sizes | dict.fromkeys(others, 1) | {first: inputs}
    if inputs == tensor.shape[-1]:
        sizes = tensor.sizes
    found = tensor.layout.ours(foreign, tensor.dims, sizes)
    return [x.reshape(inputs, *x.shape[1 + len(others) :]) for x in found]
