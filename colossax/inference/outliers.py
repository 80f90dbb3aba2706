"""Inputs that a model's maps are to keep as they are: found by what comes in, kept in a file."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from colossax.documents import as_kind, read_json
from colossax.errors import InputError
from colossax.inference.loaded import LoadedModel
from colossax.nn import describe, with_weights
from colossax.nn.experts import counted
from colossax.nn.layers import Linear
from colossax.nn.module import param
from colossax.nn.quantised.serving import ABSORBED
from colossax.nn.weights import weight_of
from colossax.sharding import linears, param_sharding, use
from colossax.typing import Dims, ParamInfo


@dataclasses.dataclass(frozen=True)
class Outliers:
    """Inputs that are far larger than others.

    Attributes:
        columns: By path of a matrix, their numbers in each of its layers, `[layers, count]`.
    """

    columns: Mapping[str, np.ndarray]

    @property
    def count(self) -> int:
        """How many of each map."""
        return next(iter(self.columns.values())).shape[1]

    def save(self, path: str | Path) -> None:
        """Write them as JSON, a list of numbers for each layer of each matrix."""
        Path(path).write_text(
            json.dumps({name: found.tolist() for name, found in self.columns.items()}) + "\n"
        )

    @classmethod
    def read(cls, path: str | Path) -> "Outliers":
        """What `save` wrote.

        Raises:
            InputError: The file is not there, or holds something else.
        """
        remedy = "give a file that find_outliers(...).save wrote"
        said = read_json(path, remedy=remedy)
        try:
            columns = {name: np.asarray(_rows(found), np.int32) for name, found in said.items()}
        except ValueError as problem:
            raise InputError(f"{path}: is no file of outliers ({problem}); {remedy}") from None
        if len({found.shape[1:] for found in columns.values()}) != 1:
            raise InputError(f"{path}: holds no outliers, or not as many of each map; {remedy}")
        return cls(columns)

    def check(self, infos: Sequence[ParamInfo]) -> None:
        """Refuse those of another model.

        Args:
            infos: Of a model that keeps so many.

        Raises:
            InputError: Matrices, layers or inputs are others.
        """
        wanted: dict[str, tuple[int, int]] = {}
        for info in infos:
            if info.quantised is not None and info.quantised.of.outliers and info.stood_at:
                wanted[info.stood_at] = (info.total_layers or 1, info.quantised.of.inputs)
        for path in sorted(wanted.keys() ^ self.columns.keys()):
            here = "has no" if path in self.columns else "has"
            raise InputError(
                f"outliers: the model {here} '{path}', unlike the one that they were found in; find"
                " them in this one"
            )
        for path, (layers, inputs) in wanted.items():
            found = self.columns[path]
            if len(found) != layers or found.min() < 0 or found.max() >= inputs:
                raise InputError(
                    f"outliers: '{path}' has {layers} layers of {inputs} inputs, and they are of"
                    f" {len(found)}, up to input {found.max()}; find them in this model"
                )


def _rows(found: Any) -> list[list[int]]:
    rows = [as_kind(row, list, "a layer") for row in as_kind(found, list, "a matrix")]
    for row in rows:
        for number in row:
            as_kind(number, int, "an input")
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError("its layers have not as many inputs, or none")
    return rows


def find_outliers(model: LoadedModel, batches: Iterable[Any], *, count: int = 16) -> Outliers:
    """The inputs of each map of a layer whose squares have the largest sum over some tokens.

    What rounding a matrix costs is, for each output, the sum of inputs times what their weights
    were rounded by; codes of a row share a step, so inputs weigh by their squares. Norms of weights
    tell nothing of that, which is why text has to be read.

    Args:
        model: In its own form: loaded without `weights`.
        batches: Token ids `[b, s]`, of text as the model will meet; a few thousand tokens will do.
        count: How many of each map.

    Raises:
        InputError: The model is in codes already, there are no batches, or fewer inputs than that.

    Cost: a forward and a backward pass for each batch, of whose activations those of all layers are
    held; the model in its own form.
    """
    if model.weights != "own" or model.adapter:
        raise InputError(
            f"outliers: they are found in a model in its own form, and this one is kept as"
            f" {model.weights if model.weights != 'own' else 'an adapter beside its base'}; load it"
            " without"
        )
    if count < 1:
        raise InputError(f"outliers: count is {count}; give 1 or more")
    squares: dict[tuple[str, int], np.ndarray] = {}
    for tokens in batches:
        for place, found in _squares(model, jnp.asarray(tokens)).items():
            squares[place] = squares.get(place, 0) + found
    if not squares:
        raise InputError("outliers: there are no batches, or no maps; give token ids [b, s]")
    return _largest(squares, count)


def _largest(squares: Mapping[tuple[str, int], np.ndarray], count: int) -> Outliers:
    columns: dict[str, list[np.ndarray]] = {}
    for (path, _), found in sorted(squares.items()):
        if found.size < count:
            raise InputError(
                f"outliers: {count} inputs of each map are asked for, and '{path}' has"
                f" {found.size}; give a smaller count"
            )
        largest = np.argsort(-found, kind="stable")[:count]
        columns.setdefault(path, []).append(np.sort(largest))
    return Outliers({path: np.stack(rows).astype(np.int32) for path, rows in columns.items()})


def _squares(model: LoadedModel, tokens: Array) -> dict[tuple[str, int], np.ndarray]:
    """Of each input, by the path of its matrix and the number of its layer."""
    bound = model.bound
    with use(bound):
        spec = describe(with_weights(model.spec.make_model, _tapped))
    infos, structure = jax.tree.flatten(spec.infos)
    own = zip(jax.tree.leaves(model.spec.infos), jax.tree.leaves(model.params), strict=True)
    held = {(info.path, info.first_layer): array for info, array in own}
    taps = [at for at, info in enumerate(infos) if info.stood_at == ""]
    others = {
        at: held[info.stood_at or info.path, info.first_layer]
        for at, info in enumerate(infos)
        if at not in taps
    }

    def total(squares: list[Array], others: dict[int, Array]) -> Array:
        leaves = others | dict(zip(taps, squares, strict=True))
        params = jax.tree.unflatten(structure, [leaves[at] for at in range(len(infos))])
        with use(bound):
            return jnp.sum(spec.merge(params)(tokens).astype(jnp.float32))

    zeros = [
        jax.device_put(
            jnp.zeros(infos[at].shape), param_sharding(bound, "params", infos[at].on_device())
        )
        for at in taps
    ]
    found: dict[tuple[str, int], np.ndarray] = {}
    for at, grads in zip(taps, jax.jit(jax.grad(total))(zeros, others), strict=True):
        info, path = infos[at], infos[at].path.removesuffix("/squares")
        rows = np.asarray(grads).reshape(max(1, info.layer_count), -1)
        if info.first_layer is not None:
            found |= {(path, info.first_layer + row): one for row, one in enumerate(rows)}
    return found


class _Tapped(nnx.Module):
    """Holds a map's weight, and what its inputs' squares are noted in."""

    def __init__(self, module: Linear):
        self.dims = module.dims
        self.own = module.held
        shape = module.weight.shape[: module.contract]
        self.squares = param(jnp.zeros(shape), self.dims[: module.contract], dtype="float32")

    @property
    def weight(self) -> "_TappedWeight":
        """See `Weighted`."""
        return _TappedWeight(weight_of(self.own, self.dims), self.squares[...])


def _tapped(name: str, module: Any, rngs: nnx.Rngs) -> _Tapped | None:
    """Of maps that `with_served` keeps in eight bits."""
    if not isinstance(module, Linear) or name.rpartition("/")[2] == ABSORBED:
        return None
    return None if "gated" in module.dims else _Tapped(module)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _TappedWeight:
    """A weight whose inputs' squares come out as the gradient of `squares`."""

    own: Any
    squares: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Weight`."""
        return self.own.shape

    @property
    def dims(self) -> Dims:
        """See `Weight`."""
        return self.own.dims

    @staticmethod
    def multiply(
        x: Array, maps: Sequence[tuple[Any, Array | None]], *, contract: int
    ) -> tuple[Array, ...]:
        """See `Weight`."""
        ys = linears(x, [(one.own, bias) for one, bias in maps], contract=contract)
        wide = jax.lax.stop_gradient(x).astype(jnp.float32)
        noted = jnp.sum(wide * wide, axis=tuple(range(x.ndim - contract)))
        return tuple(counted(y, one.squares, noted) for y, (one, _) in zip(ys, maps, strict=True))

    def rows(self, ids: Array) -> Array:
        """See `Weight`."""
        return self.own.rows(ids)

    def gathered(self, *, to: Dims | None = None) -> Array:
        """See `Weight`."""
        return self.own.gathered(to=to)
