"""Names for the dims of parameters: given from outside, or found where a model says none."""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from colossax.config import BoundPlan
from colossax.errors import InputError, PlanError
from colossax.nn.module import ModelSpec
from colossax.nn.plain.projections import found_names
from colossax.sharding import check_parameter, resolve, use
from colossax.typing import Dims, ParamInfo

GivenDims = Mapping[str, Dims]
"""Names of dims by a regular expression that is searched in the parameter's path."""


def named(spec: ModelSpec, bound: BoundPlan, given: GivenDims | None = None) -> ModelSpec:
    """The model with names for the dims of its parameters.

    Those that a pattern matches have its names, whatever the model says; the first that matches
    counts. Others that say none have those of `found_names`, but for dims whose sizes the plan's
    devices do not divide: of the two ways to split a map, the second where the first would leave
    it whole. A bias goes the way of its map. Parameters of layer stacks are given names, not found.

    Names are layout alone and change no result.

    Args:
        spec: The model.
        bound: Plan and devices.
        given: Names by pattern; in a layer stack those of one layer.

    Raises:
        InputError: A pattern cannot be read, matches nothing or only what earlier ones do, or has
            another number of names than a parameter has dims.

    Cost: the factory is traced where a parameter says no names.
    """
    leaves, structure = jax.tree.flatten(spec.infos)
    dims = _given(leaves, given or {})
    silent = _silent(spec) - set(dims)
    skipped: dict[str, str] = {}
    if silent:
        with use(bound):
            found = found_names(spec.make_model)
        by_path = {info.path: info for info in leaves}
        for info in leaves:
            if info.path in silent and info.path in found:
                names, matrix = found[info.path].names, found[info.path].matrix
                way = _way(bound, by_path[matrix], found[matrix].names)
                dims[info.path], skipped[info.path] = _fitted(bound, info, names[way])
    leaves = [dataclasses.replace(i, dims=dims.get(i.path, i.dims)) for i in leaves]
    infos = jax.tree.unflatten(structure, leaves)
    return dataclasses.replace(spec, infos=infos, skipped={p: s for p, s in skipped.items() if s})


def renamed(spec: ModelSpec, infos: Any) -> ModelSpec:
    """The model with the names that these say of parameters at the same place within it."""
    dims = {(i.own_path, i.shape): i.dims for i in jax.tree.leaves(infos)}

    def of(info: ParamInfo) -> ParamInfo:
        return dataclasses.replace(info, dims=dims.get((info.own_path, info.shape), info.dims))

    return dataclasses.replace(spec, infos=jax.tree.map(of, spec.infos))


def _given(leaves: list[ParamInfo], given: GivenDims) -> dict[str, Dims]:
    """Names by path."""
    if not isinstance(given, Mapping):
        raise InputError(
            f"dims: a {type(given).__name__} is given; give a mapping, as"
            " {r'up/kernel$': ('embed', 'mlp')}"
        )
    patterns = {pattern: _compiled(pattern, names) for pattern, names in given.items()}
    dims: dict[str, Dims] = {}
    used: set[str] = set()
    for info in leaves:
        first = next((p for p, regex in patterns.items() if regex.search(info.path)), None)
        if first is not None:
            used.add(first)
            dims[info.path] = _of_shape(info, first, tuple(given[first]))
    for pattern, regex in patterns.items():
        if pattern not in used:
            raise _unused(pattern, regex, patterns, [info.path for info in leaves])
    return dims


def _compiled(pattern: Any, names: Any) -> re.Pattern:
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not listed or not all(n is None or isinstance(n, str) for n in names):
        shown = f"({names!r},)" if isinstance(names, str) else "('embed', None)"
        raise InputError(
            f"dims: '{pattern}' is given {names!r}; give a tuple of a name (or None) per dim,"
            f" as {shown}"
        )
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as problem:
        raise InputError(
            f"dims: {pattern!r} is no regular expression ({problem}); give one that is searched in"
            " the path of a parameter, as r'attn/q/kernel$'"
        ) from None


def _of_shape(info: ParamInfo, pattern: str, names: Dims) -> Dims:
    dims = ("layers", *names) if info.stacked else names
    if len(dims) != len(info.shape):
        shape = info.shape[1:] if info.stacked else info.shape
        raise InputError(
            f"{info.path}: '{pattern}' of dims names {len(names)} dims {names} for shape {shape};"
            " give one name (or None) per dim"
        )
    return dims


def _unused(
    pattern: str, regex: re.Pattern, patterns: Mapping[str, re.Pattern], paths: list[str]
) -> InputError:
    """Why a pattern names nothing."""
    path = next((path for path in paths if regex.search(path)), None)
    if path is not None:
        first = next(p for p, earlier in patterns.items() if earlier.search(path))
        return InputError(
            f"dims: all that '{pattern}' matches, such as '{path}', is named by '{first}' before"
            " it; put the narrower pattern first"
        )
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]+", "", pattern)
    near = difflib.get_close_matches(plain, dict.fromkeys(paths), n=3, cutoff=0.0)
    return InputError(
        f"dims: no parameter's path matches '{pattern}'; the nearest are"
        f" {', '.join(repr(path) for path in near)}"
    )


def _silent(spec: ModelSpec) -> set[str]:
    """Paths of the parameters that have dims and say nothing of them."""
    arrays = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), spec.infos)
    _, state = nnx.split(nnx.merge(spec.graphdef, arrays))
    told = set()
    for path, variable in nnx.to_flat_state(state):
        metadata = variable.get_metadata()
        if metadata.get("out_sharding") or metadata.get("sharding_names"):
            told.add("/".join(map(str, path)))
    leaves = jax.tree.leaves(spec.infos)
    return {i.path for i in leaves if i.shape and i.total_layers is None} - told


def _way(bound: BoundPlan, info: ParamInfo, ways: tuple[Dims, ...]) -> int:
    """The number of the first way that splits a matrix at all, or 0."""
    split = (_is_split(bound, info, _fitted(bound, info, way)[0]) for way in ways)
    return next((number for number, one in enumerate(split) if one), 0)


def _fitted(bound: BoundPlan, info: ParamInfo, way: Dims) -> tuple[Dims, str]:
    """A way without the names of dims that the plan's devices do not divide."""
    dims: list[str | None] = [None] * len(way)
    skipped = []
    for at, dim in enumerate(way):
        if dim is None:
            continue
        tried = (*dims[:at], dim, *dims[at + 1 :])
        try:
            check_parameter(bound, dataclasses.replace(info, dims=tried))
            dims[at] = dim
        except PlanError:
            skipped.append(f"'{dim}' of {info.shape[at]}")
    return tuple(dims), " and ".join(skipped)


def _is_split(bound: BoundPlan, info: ParamInfo, dims: Dims) -> bool:
    return any(resolve(bound, "params", dims, info.shape, name=info.path))
