"""Parameters of modules that do not know the library: gathered by the plan where they are read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from colossax.nn.module import ModelSpec
from colossax.sharding import current, gather_for_others
from colossax.typing import ParamInfo

_CASTING = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)
"""Modules of Flax that cast their weights to their `dtype` before anything else.

Not of classes derived from them, nor of tables, which tied heads read in their dtype at rest.
"""


@dataclasses.dataclass(frozen=True)
class Gather:
    """What Flax calls when a parameter is read (`on_get_value`), so once for each use of it.

    Without a plan in force, or of a part of the parameter, it changes nothing.

    Attributes:
        info: Of the parameter, whole stacks of layers included.
        dtype: To which its module casts it; None: it does not.
    """

    info: ParamInfo
    dtype: Any = None

    def __call__(self, variable: nnx.Variable, value: Any) -> Any:
        """The value as a matmul wants it; in a scan over layers that of one layer."""
        bound, shape = current(), jnp.shape(value)
        first = len(self.info.shape) - len(shape)
        whole = shape == jnp.shape(variable.get_raw_value()) == self.info.shape[first:]
        if bound is None or bound.single or not whole:
            return value
        dtype = value.dtype if self.dtype is None else self.dtype
        return gather_for_others(value, self.info.dims[first:], dtype)


def with_gathers(spec: ModelSpec) -> ModelSpec:
    """The model, of which parameters that no operation of the library gathers do so when read.

    Those are all that have names of dims and were not made by `colossax.nn.param`. Left to
    itself the compiler may move activations in place of weights. What is read in a region that is
    recomputed (`nnx.remat`) is gathered again in backward; elsewhere it is kept until then. A
    kernel that its module casts to fewer bytes is read in that dtype, by whoever reads it.
    """
    model = spec.merge(jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), spec.infos))
    nodes = dict(nnx.iter_graph(model))
    foreign = {path: node for path, node in nodes.items() if _is_foreign(node)}
    infos = {path: info for path in foreign if any((info := _at(spec.infos, path)).dims)}
    if not infos:
        return spec
    for path, info in infos.items():
        foreign[path].set_metadata(on_get_value=Gather(info, _cast_to(nodes[path[:-1]], info)))
    return dataclasses.replace(spec, graphdef=nnx.split(model)[0])


def _is_foreign(node: Any) -> bool:
    if not isinstance(node, nnx.Param):
        return False
    metadata = node.get_metadata()
    return not metadata.get("own_gather") and not metadata.get("on_get_value")


def _at(infos: Any, path: tuple) -> ParamInfo:
    for name in path:
        infos = infos[name]
    return infos


def _cast_to(owner: Any, info: ParamInfo) -> Any:
    """Where the module would cast a matrix to fewer bytes, these are sent."""
    if type(owner) not in _CASTING or owner.dtype is None or len(info.shape) < 2:
        return None
    dtype = jnp.dtype(owner.dtype)
    return dtype if dtype.itemsize < info.dtype.itemsize else None
