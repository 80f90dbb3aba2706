"""Models made of other models' layers: where a student begins."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from colossax.errors import InputError
from colossax.models.altered import STACK, layer_numbers, mixture_kinds
from colossax.models.hf_folder import by_path
from colossax.models.parameters import ModelParams
from colossax.models.registry import maker
from colossax.nn import describe


def with_layers(params: ModelParams, layers: Sequence[int]) -> ModelParams:
    """The model with some of its layers, in their order: where a student begins.

    Args:
        params: Of the teacher.
        layers: Numbers of those that are kept, ascending.

    Raises:
        InputError: They are no layers of it in their order, or where experts stand does not come
            out as the configuration has it; or the model has two stacks of layers.

    Source: Sanh et al. 2019, DistilBERT; Rajbhandari et al. 2022, DeepSpeed-MoE.
    """
    _check_one_stack(params)
    keep, total = list(layers), params.config.layers
    if not keep or keep != sorted(set(keep)) or not 0 <= keep[0] <= keep[-1] < total:
        raise InputError(
            f"layers: found {','.join(map(str, keep)) or 'none'}; give some of 0 to {total - 1}, in"
            " order"
        )
    config = dataclasses.replace(params.config, layers=len(keep))
    old, new = _sorts(params.config), _sorts(config)
    wanted = tuple(old[at] for at in keep)
    if new != wanted:
        raise InputError(
            f"layers: those kept are {', '.join(wanted)}, and a model of {len(keep)} layers has"
            f" {', '.join(new)}; keep layers of kinds that come in this order"
        )
    kinds, kinds_before = (one.decoder().layer_kinds for one in (config, params.config))

    def source(path: str, row: int) -> tuple[str, int]:
        """Path and row in the teacher, of a row of a stack."""
        number = keep[layer_numbers(config, path)[row]]
        rest = path.removeprefix(STACK)
        rest = rest.split("/", 1)[1] if kinds else rest
        if not kinds_before:
            return f"{STACK}{rest}", number
        kind = kinds_before[number]
        return f"{STACK}{kind}/{rest}", kinds_before[:number].count(kind)

    def read(path: str, layer: int | None, expert: int | None) -> np.ndarray:
        if layer is None:
            return params.read(path, None, expert)
        return params.read(*source(path, layer), expert)

    spec = describe(maker(config))
    stacked = {path for path in by_path(spec) if path.startswith(STACK)}
    dtypes = {
        path: params.dtypes[source(path, 0)[0] if path in stacked else path]
        for path in by_path(spec)
    }
    return ModelParams(config=config, spec=spec, dtypes=dtypes, read=read)


def _check_one_stack(params: ModelParams) -> None:
    """Refuse a model whose layers are not numbered alone: which are meant is not said."""
    layered = (path for path, info in params.infos.items() if info.first_layer is not None)
    other = next((path for path in layered if not path.startswith(STACK)), None)
    if other is not None:
        raise InputError(
            f"layers: the model has several stacks of layers, as {other.partition(STACK)[0]}layers,"
            " and numbers do not say whose are meant; leave them out, or take a model of one stack"
        )


def _sorts(config: Any) -> tuple[str, ...]:
    """Of each layer `dense` or `sparse`, and where layers see other keys `local` or `full`."""
    decoder = config.decoder()
    if not decoder.full_layers:
        return mixture_kinds(config)
    seen = ("full" if full else "local" for full in decoder.sees_all)
    return tuple(" ".join(names) for names in zip(seen, mixture_kinds(config), strict=True))
