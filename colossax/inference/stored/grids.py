"""What the codes are that a checkpoint has of a folder which was quantised before."""

import math
from typing import Any

import numpy as np

from colossax.checkpoint import RecordReader
from colossax.errors import InputError
from colossax.models.parameters import CODES
from colossax.nn.quantised.grid import Grid

_HELD_AS = "/w"


class KeptGrids:
    """Of each map of a layer what its codes are; see `nn.quantised.kept.GridOf`."""

    def __init__(self, reader: RecordReader, name: str):
        """Look at shapes and types of records.

        Args:
            reader: The checkpoint.
            name: Of the model there.
        """
        self._reader = reader
        records = reader.records()
        self._codes = _below(f"{name}/{CODES}/", records)
        self._params = _below(f"{name}/params/", records)

    def check(self) -> None:
        """Refuse a checkpoint that has none.

        Raises:
            InputError: It was not imported from a folder in codes, or was trained since.
        """
        if not self._codes:
            raise InputError(
                f"weights: kept is asked for, and checkpoint '{self._reader.directory}' step"
                f" {self._reader.step} has no codes of its own; import a folder quantised by GPTQ,"
                " AWQ or compressed-tensors, or give int4 or int8, which make codes"
            )

    def __call__(self, name: str, shape: tuple[int, ...]) -> Grid | None:
        """What the codes of a map are; None: it has none, or not in all layers that are so called.

        Args:
            name: From its layer down, `attn/q`.
            shape: Of the matrix of one layer.
        """
        end = f"/{name}{_HELD_AS}"
        of = [p for p, (full, _) in self._params.items() if p.endswith(end) and full[1:] == shape]
        grids = {self._grid(path, shape) for path in of}
        return grids.pop() if len(grids) == 1 else None

    def _grid(self, path: str, shape: tuple[int, ...]) -> Grid | None:
        parts = _below(f"{path}/", self._codes)
        if "codes" not in parts:
            return None
        (codes, kind), (scales, dtype) = parts["codes"], parts["scales"]
        return Grid(
            bits=8 * math.prod(codes[1:]) // math.prod(shape),
            floats=kind != np.uint8,
            scales=dtype.name,
            groups=scales[1],
            zeros="zeros" in parts,
            ordered="groups" in parts,
        )


def _below(prefix: str, records: dict[str, Any]) -> dict[str, Any]:
    """Those whose names begin so, by what follows."""
    return {
        name.removeprefix(prefix): one for name, one in records.items() if name.startswith(prefix)
    }
