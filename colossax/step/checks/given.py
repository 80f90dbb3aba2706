"""What a step is given: a state of its own, arrays of numbers, tokens that are there."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from colossax.errors import InputError
from colossax.nn import ModelSpec
from colossax.typing import PIXELS, SOURCE, TOKEN_TYPES, Batch, TrainState

_AS_IN = "as in `state, metrics = step(state, batch)`"


def check_state(state: Any, abstract: TrainState, names: tuple[str, ...] | None = None) -> None:
    """Refuse what is no state of this step, and one that a step has had already.

    Of that one XLA would read freed memory, or crash; its step count tells, which every step
    replaces.

    Args:
        state: Anything.
        abstract: Shapes of the step's own.
        names: Parts that must be as in the step's own; None: all.

    Raises:
        InputError: It is something else, of another model or optimizer, or has been given up.

    Cost: on the host about half a microsecond for each array.
    """
    if not isinstance(state, Mapping):
        taken_apart = "; a step returns two things, take them apart" if _is_pair(state) else ""
        raise InputError(
            f"step: the state is a {type(state).__name__}{taken_apart}; give the one that boost or"
            f" the step before returned, {_AS_IN}"
        )
    missing = [name for name in abstract if name not in state]
    if missing:
        raise InputError(
            f"step: the state has no '{missing[0]}', but {_listed(state)}; give the whole state,"
            f" and before the batch, {_AS_IN}"
        )
    count = state["step"]
    if is_there(count) and count.is_deleted():
        raise InputError(
            "step: this state was given up to an earlier call, which returned the one that follows"
            f" it; keep that one, {_AS_IN}"
        )
    for name in abstract if names is None else names:
        _check_same_form(name, state[name], abstract[name])
    _check_same_devices(count, abstract["step"])


def _is_pair(state: Any) -> bool:
    return isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], Mapping)


def _check_same_form(name: str, found: Any, wanted: Any) -> None:
    leaves, structure = jax.tree.flatten(found)
    if structure == jax.tree.structure(wanted):
        pairs = zip(leaves, jax.tree.leaves(wanted), strict=True)
        if all(getattr(x, "shape", ()) == y.shape for x, y in pairs):
            return
    have, want = _shapes(found), _shapes(wanted)
    different = [path for path in have.keys() | want.keys() if have.get(path) != want.get(path)]
    path = min(different, default="")
    raise InputError(
        f"step: the state is of another model or optimizer: '{name}{path}' is"
        f" {have.get(path, 'not there')}, and {want.get(path, 'not there')} in this step's own;"
        " give a state that boost made with this step, or step.restore read"
    )


def _shapes(tree: Any) -> dict[str, str]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        "".join(f"/{jax.tree_util.keystr((key,), simple=True)}" for key in path): str(
            list(np.shape(leaf))
        )
        for path, leaf in found
    }


def _check_same_devices(count: Any, wanted: jax.ShapeDtypeStruct) -> None:
    if not is_there(count) or wanted.sharding is None or not count.committed:
        return
    here, there = count.sharding.device_set, wanted.sharding.device_set
    if here != there:
        raise InputError(
            f"step: the state lies on {len(here)} devices ({_ids(here)}), and the step's plan on"
            f" {len(there)} ({_ids(there)}); move it by jax.device_put(state, step.shardings)"
        )


def _ids(devices: Any) -> str:
    return ", ".join(str(number) for number in sorted(device.id for device in devices))


def is_there(x: Any) -> bool:
    """Whether it is an array on a device, not one that is traced."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def host_array(name: str, x: Any) -> np.ndarray:
    """A host array in the dtype it would have on a device (int64 becomes int32).

    Raises:
        InputError: It is no array of numbers.
    """
    try:
        x = np.asarray(x)
    except ValueError as problem:
        raise InputError(f"batch '{name}': its rows differ in length; pad them to one") from problem
    if x.dtype.kind not in "biufcV":
        found = f"a {type(x.item()).__name__}" if x.ndim == 0 else f"an array of {x.dtype}"
        raise InputError(f"batch '{name}': found {found}; give an array of numbers")
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def check_tokens(batch: Batch, known: Mapping[str, int]) -> None:
    """Refuse numbers on the host that no table or head of the model has: tokens above all.

    Targets of weight 0 may be anything.

    Args:
        batch: Host arrays are looked at.
        known: See `known_to`.

    Raises:
        InputError: With the first of them.

    Cost: two passes over each array.
    """
    # Of a model that tells classes a loss may take them for others, or for nothing.
    unread = {"targets"} if "labels" in known else set()
    for name in sorted({"tokens", "targets", *known} - unread):
        ids, vocab = batch.get(name), known.get(name)
        if name == "tokens" and vocab is not None:
            vocab += _places(batch, known)
        if not isinstance(ids, np.ndarray) or ids.size == 0 or ids.dtype.kind not in "iu":
            continue
        least = np.iinfo(ids.dtype).min if name == "labels" else 0  # below 0 there is none
        if ids.min() >= least and (vocab is None or ids.max() < vocab):
            continue
        wrong = (ids < least) if vocab is None else (ids < least) | (ids >= vocab)
        weights = batch.get("weights")
        if name == "targets" and isinstance(weights, np.ndarray) and weights.shape == ids.shape:
            wrong &= weights != 0
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0].tolist())
            range_ = "tokens count from 0" if vocab is None else f"the model knows 0 to {vocab - 1}"
            raise InputError(
                f"batch '{name}': {ids[place]} at {list(place)}, and {range_}; give {_wanted(name)}"
            )


def _wanted(name: str) -> str:
    if name in ("tokens", "targets", SOURCE):
        return "tokens of the model's vocabulary, and 'weights' 0 where a target does not count"
    return "one of those, or raise the model's number of them"


PLACES = "places"
"""What `known_to` calls the tokens that an image takes."""

PIXELS_PER_PLACE = "pixels per place"
"""And the pixels of each, where images are of any size."""


def _places(batch: Batch, known: Mapping[str, int]) -> int:
    """Tokens of each row that are places of its images."""
    pixels = batch.get(PIXELS)
    if pixels is None or not {PLACES, PIXELS_PER_PLACE} & known.keys():
        return 0
    images, height, width = pixels.shape[1:4]
    if PLACES in known:
        return images * known[PLACES]
    return images * (height * width // known[PIXELS_PER_PLACE])


def known_to(spec: ModelSpec) -> dict[str, int]:
    """`known_numbers`, and of a model that reads images among its tokens how many one takes."""
    infos = spec.infos
    if not {"patch_height", "vocab"} <= {dim for i in jax.tree.leaves(infos) for dim in i.dims}:
        return known_numbers(infos)
    model = spec.merge(jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos))
    if not hasattr(model, "places"):
        return known_numbers(infos)
    if model.places is not None:
        return known_numbers(infos) | {PLACES: model.places}
    return known_numbers(infos) | {PIXELS_PER_PLACE: math.prod(model.square)}


def known_numbers(infos: Any) -> dict[str, int]:
    """How many numbers, from 0, a model knows in each array of a batch; those it has a part for."""
    known = {}
    if vocab := _most(infos, "vocab", table=True):
        known |= {"tokens": vocab, "targets": vocab, SOURCE: vocab}
    if kinds := _most(infos, TOKEN_TYPES, table=True):
        known[TOKEN_TYPES] = kinds
    if (classes := _most(infos, "outputs")) > 1:  # a single number is no class
        known["labels"] = classes
    return known


def _most(infos: Any, dim: str, *, table: bool = False) -> int:
    """Largest size of a dim of that name; with `table`, 0 unless a parameter begins with it."""
    named = [info for info in jax.tree.leaves(infos) if dim in info.dims]
    if table and not any(info.dims[0] == dim for info in named):
        return 0
    return max((info.shape[info.dims.index(dim)] for info in named), default=0)


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"
