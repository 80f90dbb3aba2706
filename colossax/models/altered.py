"""Models made of other models' parameters: experts left out, joined or copied.

Each takes `ModelParams` and gives others, of which nothing is computed before it is read: so a
model larger than memory goes from one checkpoint to the next a layer at a time.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from colossax.config import at_least, within
from colossax.errors import InputError
from colossax.models.llama import LlamaConfig
from colossax.models.mistral import MistralConfig
from colossax.models.mixtral import MixtralConfig
from colossax.models.parameters import ModelParams
from colossax.models.qwen3 import Qwen3Config
from colossax.models.qwen3_moe import Qwen3MoEConfig
from colossax.models.registry import FAMILIES, family_of, maker
from colossax.nn import MixtureConfig, describe
from colossax.typing import ParamInfo

WITH_EXPERTS: dict[type, type] = {
    LlamaConfig: MixtralConfig,
    MistralConfig: MixtralConfig,
    Qwen3Config: Qwen3MoEConfig,
}
"""By the configuration of a dense family that of the one with the same parts and experts."""

_OF_EXPERTS = ("experts", "scores")
"""Dims that count experts."""

STACK, _MLP = "layers/", "layers/mlp/"
_MATRICES = ("up", "gate", "down")


def pruned(params: ModelParams, keep: Sequence[Sequence[int]]) -> ModelParams:
    """The model with some of its experts, and of its router their columns.

    Its logits are those of the whole model whose router never chooses the others.

    Args:
        params: Of a model with experts.
        keep: Experts to keep of each layer that has some, equally many; see `most_used`.

    Raises:
        InputError: There are no experts, or other layers; an expert is none or named twice; layers
            keep different numbers, or less than a token chooses.

    Source: Kim et al. 2021, Scalable and Efficient MoE Training for Multitask Multilingual Models.
    """
    mixture = _mixture(params, "prune")
    kept = _checked(params, mixture, keep)
    config = dataclasses.replace(params.config, experts=len(kept[0]))
    spec = describe(maker(config))
    dims = {path: _own_dims(info) for path, info in params.infos.items()}
    kept_of = dict(zip(_sparse(params), kept, strict=True))

    def read(path: str, layer: int | None, expert: int | None) -> np.ndarray:
        if layer is None or not set(dims[path]) & set(_OF_EXPERTS):
            return params.read(path, layer, expert)
        own = kept_of[layer_numbers(params.config, path)[layer]]
        if expert is not None:
            return params.read(path, layer, own[expert])
        at = next(at for at, dim in enumerate(dims[path]) if dim in _OF_EXPERTS)
        return np.take(params.read(path, layer, None), own, axis=at)

    return ModelParams(config=config, spec=spec, dtypes=params.dtypes, read=read)


def most_used(
    params: ModelParams, count: int, *, loads: Any = None, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Which experts to keep of each layer that has some.

    Args:
        params: Of a model with experts.
        count: How many of each layer.
        loads: How much each was used, `[layers, experts]`, of all layers or of those with experts:
            the most used are kept, of equals the first. None: any, at random.
        seed: Of that.

    Raises:
        InputError: There are no experts, or not so many; the loads are of another model.
    """
    mixture = _mixture(params, "prune")
    at_least(1).check(count, "experts.prune")
    if count > mixture.experts:
        raise InputError(
            f"experts.prune: {count} experts are to be kept, and there are {mixture.experts}; give"
            f" at most {mixture.experts}"
        )
    layers = _sparse(params)
    if loads is None:
        rngs = (np.random.default_rng((seed, row)) for row in range(len(layers)))
        drawn = (rng.permutation(mixture.experts)[:count] for rng in rngs)
        return tuple(tuple(sorted(map(int, one))) for one in drawn)
    found = np.asarray(loads, np.float64)
    if found.ndim == 2 and len(found) == params.config.layers:
        found = found[list(layers)]
    if found.shape != (len(layers), mixture.experts):
        raise InputError(
            f"experts.loads: they are of {' x '.join(map(str, found.shape))} layers and experts,"
            f" and the model has {len(layers)} x {mixture.experts}; give those of a run of it"
        )
    order = np.argsort(-found, axis=-1, kind="stable")[:, :count]
    return tuple(tuple(sorted(map(int, row))) for row in order)


def merged(one: ModelParams, other: ModelParams) -> ModelParams:
    """The experts of two models in one: those of the first, then those of the other.

    The columns of their routers stand side by side, so that a token chooses among all. All else is
    the first one's: what the two had in common when they began to be trained apart.

    Raises:
        InputError: One has no experts, or they differ in more than their number.
    """
    for params in (one, other):
        _mixture(params, "merge")
    _check_alike(one.config, other.config)
    mine, experts = one.config.experts, one.config.experts + other.config.experts
    config = dataclasses.replace(one.config, experts=experts)
    dims = {path: _own_dims(info) for path, info in one.infos.items()}

    def read(path: str, layer: int | None, expert: int | None) -> np.ndarray:
        if layer is None or not set(dims[path]) & set(_OF_EXPERTS):
            return one.read(path, layer, expert)
        if expert is not None:
            taken = (one, expert) if expert < mine else (other, expert - mine)
            return taken[0].read(path, layer, taken[1]).astype(dtypes[path], copy=False)
        at = next(at for at, dim in enumerate(dims[path]) if dim in _OF_EXPERTS)
        both = [params.read(path, layer, None).astype(dtypes[path]) for params in (one, other)]
        return np.concatenate(both, axis=at)

    of_experts = {path for path, names in dims.items() if set(names) & set(_OF_EXPERTS)}
    dtypes = dict(one.dtypes)
    for path in of_experts:
        dtypes[path] = np.promote_types(one.dtypes[path], other.dtypes[path])
    return ModelParams(config=config, spec=describe(maker(config)), dtypes=dtypes, read=read)


def upcycled(
    params: ModelParams,
    experts: int,
    *,
    choices: int = 2,
    noise: float = 0.0,
    redrawn: float = 0.0,
    seed: int = 0,
) -> ModelParams:
    """A model with experts from a dense one: each a copy of the MLP, and a random router.

    Weights of the chosen sum to 1, so that without noise it says what the dense model says.

    Args:
        params: Of a dense model.
        experts: Of each layer.
        choices: Experts of a token.
        noise: Standard deviation of what is added to every copy, over that of the matrix.
        redrawn: Share of the hidden units of each copy that are drawn anew, with mean and standard
            deviation of the matrix (Nakamura et al. 2025, Drop-Upcycling).
        seed: Of the router and of the rest that is drawn.

    Raises:
        InputError: The model has experts, or parts that no family with experts has.

    Source: Komatsuzaki et al. 2023, Sparse Upcycling.
    """
    at_least(0).check(noise, "experts.noise")
    within(0, 1).check(redrawn, "experts.redrawn")
    config = _with_experts(params.config, experts, choices)
    spec, deviation = describe(maker(config)), config.decoder().init_std
    names = [name for name in _MATRICES if f"{_MLP}{name}/w" in params.infos]

    def copy(name: str, layer: int, expert: int) -> np.ndarray:
        matrix = params.read(f"{_MLP}{name}/w", layer, None)
        return _copy(matrix, name, noise, redrawn, (seed, layer, expert))

    def router(layer: int) -> np.ndarray:
        rng = np.random.default_rng((seed, layer))
        drawn = rng.standard_normal((params.config.embed, experts)) * deviation
        return drawn.astype(dtypes[f"{_MLP}router/w"])

    def read(path: str, layer: int | None, expert: int | None) -> np.ndarray:
        name = path.removeprefix(_MLP)
        if layer is None or not path.startswith(_MLP):
            return params.read(path, layer, None)
        if name == "router/w":
            return router(layer)
        if expert is not None:
            return copy(name, layer, expert)
        return np.stack([copy(name, layer, each) for each in range(experts)])

    dtypes = {path: dtype for path, dtype in params.dtypes.items() if not path.startswith(_MLP)}
    dtypes |= {f"{_MLP}{name}": params.dtypes[f"{_MLP}{name}/w"] for name in names}
    dtypes[f"{_MLP}router/w"] = params.dtypes[f"{_MLP}up/w"]
    return ModelParams(config=config, spec=spec, dtypes=dtypes, read=read)


def _mixture(params: ModelParams, verb: str) -> MixtureConfig:
    """The experts of a model that has some, each for itself.

    Raises:
        InputError: It has none, or they stand in groups.
    """
    mixture = params.config.decoder().mixture
    if mixture is None:
        raise InputError(
            f"experts.{verb}: a {family_of(params.config).name} has no experts; give a model that"
            " has, or make one of it with upcycle"
        )
    grouped = mixture.groups > 1
    if grouped or mixture.pyramid:
        how = f"stand in {mixture.groups} groups" if grouped else "are not equally many"
        raise InputError(
            f"experts.{verb}: experts that {how} cannot be left out or joined one by one; give a"
            " model whose layers have equally many, each for itself"
        )
    return mixture


def _sparse(params: ModelParams) -> tuple[int, ...]:
    """Numbers of the layers that have experts."""
    return tuple(at for at, kind in enumerate(mixture_kinds(params.config)) if kind != "dense")


def _checked(
    params: ModelParams, mixture: MixtureConfig, keep: Sequence[Sequence[int]]
) -> tuple[list[int], ...]:
    """Experts to keep, as lists."""
    kept, layers = tuple(list(row) for row in keep), len(_sparse(params))
    counts = {len(row) for row in kept}
    if len(kept) != layers or len(counts) != 1:
        raise InputError(
            f"experts.prune: found {len(kept)} layers that keep {sorted(counts)} experts; give"
            f" equally many of each of the {layers} layers that have some"
        )
    for row in kept:
        if len(set(row)) < len(row) or not set(row) <= set(range(mixture.experts)):
            raise InputError(
                f"experts.prune: found {row}; give different ones of 0 to {mixture.experts - 1}"
            )
    if (count := counts.pop()) < mixture.choices:
        raise InputError(
            f"experts.prune: {count} experts are kept, and a token chooses {mixture.choices}; keep"
            f" at least {mixture.choices}"
        )
    return kept


def _check_alike(one: Any, other: Any) -> None:
    """Refuse models that differ in more than the number of their experts."""
    if type(one) is not type(other):
        names = [family_of(each).name for each in (one, other)]
        raise InputError(
            f"experts.merge: one is a {names[0]} and the other a {names[1]}; give two of one family"
        )
    for field in dataclasses.fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name != "experts" and mine != theirs:
            raise InputError(
                f"experts.merge: {field.name} is {mine} in one and {theirs} in the other; give"
                " models that differ in their experts alone"
            )


def _with_experts(dense: Any, experts: int, choices: int) -> Any:
    """The configuration of a model with experts that has a dense one's parts.

    Raises:
        InputError: There are experts already, or there is none.
    """
    name = family_of(dense).name
    if dense.decoder().mixture is not None:
        raise InputError(
            f"experts.upcycle: a {name} has experts already; give a dense model, or merge two"
        )
    if type(dense) not in WITH_EXPERTS:
        known = ", ".join(_family_name(one) for one in WITH_EXPERTS)
        raise InputError(
            f"experts.upcycle: no family with experts has the parts of a {name}; give one of"
            f" {known}"
        )
    made = WITH_EXPERTS[type(dense)]
    names = {field.name for field in dataclasses.fields(made)}
    shared = {f.name: getattr(dense, f.name) for f in dataclasses.fields(dense) if f.name in names}
    if "expert_mlp" in names:
        shared["expert_mlp"] = dense.mlp
    config = made(**shared, experts=experts, choices=choices)
    before, after = dense.decoder(), config.decoder()
    for field in dataclasses.fields(before):
        mine, theirs = getattr(before, field.name), getattr(after, field.name)
        if field.name != "mixture" and mine != theirs:
            raise InputError(
                f"experts.upcycle: {field.name} of this {name} is {mine}, for which"
                f" {family_of(config).name} has no place; give a model without it"
            )
    return config


def _family_name(config: type) -> str:
    """Name of the family whose configurations are of a type."""
    return next(name for name, family in FAMILIES.items() if family.config is config)


def _copy(
    matrix: np.ndarray, name: str, noise: float, redrawn: float, place: tuple[int, int, int]
) -> np.ndarray:
    """A matrix of an MLP as that of an expert.

    Args:
        matrix: Hidden units are its last dim, of `down` the first.
        name: Of `_MATRICES`.
        noise: See `upcycled`.
        redrawn: Likewise; the same units in all matrices of an expert.
        place: Seed, layer and expert.
    """
    if not noise and not redrawn:
        return matrix
    wide = matrix.astype(np.float32)
    mean, deviation = wide.mean(), wide.std()
    rng = np.random.default_rng((*place, _MATRICES.index(name)))
    wide += noise * deviation * rng.standard_normal(wide.shape, np.float32)
    fresh = mean + deviation * rng.standard_normal(wide.shape, np.float32)
    units = np.random.default_rng(place).random(wide.shape[0 if name == "down" else 1]) < redrawn
    return np.where(units[:, None] if name == "down" else units, fresh, wide).astype(matrix.dtype)


def _own_dims(info: ParamInfo) -> tuple[Any, ...]:
    """Dims of one layer's array."""
    return info.dims[1:] if info.stacked else info.dims


def mixture_kinds(config: Any) -> tuple[str, ...]:
    """Of each layer `dense` or `sparse`."""
    decoder = config.decoder()
    if decoder.mixture is None:
        return ("dense",) * config.layers
    return decoder.mixture.kinds(config.layers)


def layer_numbers(config: Any, path: str) -> Sequence[int]:
    """Of each row of a stack, which has layers of one kind, the number among all layers."""
    kinds = config.decoder().layer_kinds
    if not kinds:
        return range(config.layers)
    kind = path.removeprefix(STACK).split("/", 1)[0]
    return [number for number, one in enumerate(kinds) if one == kind]
