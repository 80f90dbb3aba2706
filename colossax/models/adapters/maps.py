"""Matrices of a model as `peft` has them."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from colossax.models.conversion import Tensor
from colossax.models.layouts import PART

_WEIGHT = ".weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterMap:
    """A matrix of the base that `peft` may put a pair beside.

    Attributes:
        name: Of its module there.
        path: Ours.
        layer: Number of the layer among those of its kind.
        ins, outs: Our dims of its input and output, in the order of the foreign matrix.
        dims: Our order.
        sizes: Of the dims.
    """

    name: str
    path: str
    layer: int | None
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    dims: tuple[str, ...]
    sizes: Mapping[str, int]

    def pair(self, down: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`lora_A` `[rank, in]` and `lora_B` `[out, rank]`."""
        ours = self.dims[: len(self.ins)], self.dims[len(self.ins) :]
        a = down.transpose([*(ours[0].index(dim) for dim in self.ins), down.ndim - 1])
        b = up.transpose([0, *(1 + ours[1].index(dim) for dim in self.outs)])
        return a.reshape(-1, down.shape[-1]).T, b.reshape(up.shape[0], -1).T

    def ours(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`down` and `up` from those."""
        rank = len(a)
        down = self._spread(a.T.reshape(*(self.sizes[dim] for dim in self.ins), rank), self.ins)
        up = b.T.reshape(rank, *(self.sizes[dim] for dim in self.outs))
        return down, np.moveaxis(self._spread(np.moveaxis(up, 0, -1), self.outs), -1, 0)

    def vector(self, x: np.ndarray) -> np.ndarray:
        """A vector over our columns `[*out]` as one over theirs."""
        ours = self.dims[len(self.ins) :]
        return x.transpose([ours.index(dim) for dim in self.outs]).ravel()

    def our_vector(self, x: np.ndarray) -> np.ndarray:
        """And back."""
        spread = x.reshape([self.sizes[dim] for dim in self.outs])
        return self._spread(spread[..., None], self.outs)[..., 0]

    def _spread(self, x: np.ndarray, theirs: tuple[str, ...]) -> np.ndarray:
        """From their order of dims to ours; the last one stays."""
        ours = [dim for dim in self.dims if dim in theirs]
        return x.transpose([*(theirs.index(dim) for dim in ours), x.ndim - 1])

    @property
    def shape(self) -> tuple[int, int]:
        """Input and output."""
        ins, outs = (np.prod([self.sizes[dim] for dim in part]) for part in (self.ins, self.outs))
        return int(ins), int(outs)


def map_of(tensor: Tensor) -> AdapterMap | None:
    groups, names = tensor.layout.groups, tensor.layout.names
    alone = len(tensor.infos) == 1 and PART not in names and tensor.layout.unlike is None
    if not alone or len(groups) != 2 or not tensor.name.endswith(_WEIGHT):
        return None
    for ins, outs in (groups, groups[::-1]):
        if set(tensor.dims[: len(ins)]) == set(ins):
            return AdapterMap(
                name=tensor.name.removesuffix(_WEIGHT),
                path=tensor.infos[0].path,
                layer=tensor.layer,
                ins=ins,
                outs=outs,
                dims=tensor.dims,
                sizes=tensor.sizes,
            )
    return None
