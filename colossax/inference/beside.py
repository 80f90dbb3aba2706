"""Several adapters beside one base, to be multiplied in the same steps."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.checkpoint import Checkpointer, RecordReader, slot_of
from colossax.checkpoint.base import check_base, checksum
from colossax.config import BoundPlan, FrozenDict, MeshAxis, Plan
from colossax.errors import CheckpointError, InputError
from colossax.inference.decode import decoding_model
from colossax.inference.loaded import LoadedModel
from colossax.inference.loading import StoredModel
from colossax.inference.reading import reads_of
from colossax.models import maker
from colossax.models.adapters.stored import adapter_infos
from colossax.nn import AdapterConfig, MakeModel, ModelSpec
from colossax.nn.adapters.by_token import ADAPTERS, RANK
from colossax.nn.adapters.several import (
    SharesNoStepError,
    check_shares_steps,
    with_adapters,
)
from colossax.nn.quantised.module import with_quantised
from colossax.sharding import param_sharding
from colossax.typing import Dims, ParamInfo, Params


def beside(base: StoredModel, adapters: Mapping[str, StoredModel]) -> "StoredBeside":
    """A base with adapters side by side; an engine serves requests of all in one step.

    Args:
        base: A whole model.
        adapters: That learned beside it, by the names that requests give; one or more.

    Raises:
        SharesNoStepError: One of them is DoRA.
        InputError: The base is an adapter, or one learned beside codes and `base.weights` asks for
            others.
        CheckpointError: One is no adapter, or of another base, or they learned beside bases in
            several forms.
    """
    if base.base is not None:
        raise InputError(
            f"adapters: '{base.directory}' is an adapter itself; give its base, and it beside that"
        )
    first = next(iter(adapters.values()))
    for name, one in adapters.items():
        check_shares_steps(name, one.adapter)
        one.check_beside(first)
        assert one.base is not None
        where = f"adapter '{name}' ('{one.directory}' step {one.step})"
        check_base(*base.origin, checksum(*one.base), where)
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return StoredBeside(**fields, beside=FrozenDict(adapters))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredBeside(StoredModel):
    """A base, and adapters that are loaded side by side with it; see `beside`.

    Attributes:
        beside: By name.
    """

    beside: Mapping[str, StoredModel]

    def __post_init__(self):
        form = self._first.base
        if form != "own" and self.weights != "own":
            raise InputError(
                f"weights: {self.weights} is asked for, and the adapters learned beside matrices"
                f" kept as {form}; give own, which leaves them so"
            )

    @property
    def _first(self) -> AdapterConfig:
        """Of all of them what is said of the base."""
        return next(iter(self.beside.values())).adapter

    @property
    def frozen(self) -> bool:
        """See `StoredModel`."""
        return True

    def _make_model(self) -> MakeModel:
        made = maker(self.model)
        if self._first.base != "own":
            made = with_quantised(made, self._first.base, double=self._first.double)
        made = self._served(made)
        return with_adapters(made, {name: one.adapter for name, one in self.beside.items()})

    def _described(
        self, plan: Plan, devices: Sequence[jax.Device] | None
    ) -> tuple[BoundPlan, ModelSpec]:
        """See `StoredModel`.

        Raises:
            SharesNoStepError: There are stages, or the model reads something before its prompt.
        """
        bound, spec = super()._described(plan, devices)
        if bound.mesh.shape[MeshAxis.STAGE] > 1:
            raise SharesNoStepError(
                "mesh axis 'stage': adapters beside one base share steps of all layers; give those"
                " devices to 'tensor' or 'fsdp', or one adapter alone"
            )
        if reads_of(decoding_model(spec)).anything:
            raise SharesNoStepError(
                "adapters: the model reads a source, sound or images before its prompt, which each"
                " would read in its own way; give one adapter alone"
            )
        return bound, spec

    def _loaded(
        self, bound: BoundPlan, spec: ModelSpec, frozen: Mapping[int, jax.Array]
    ) -> LoadedModel:
        loaded = super()._loaded(bound, spec, frozen)
        return dataclasses.replace(loaded, adapters=tuple(self.beside))

    def _read(self, bound: BoundPlan, spec: ModelSpec, found: Mapping[int, jax.Array]) -> Params:
        """The base, and of each map the adapters' matrices as one array."""
        infos = jax.tree.leaves(spec.infos)
        held = [_Held(name, one) for name, one in self.beside.items()]
        for one in held:
            one.check()
        stacks = {
            at: _side_by_side(info, held, bound)
            for at, info in enumerate(infos)
            if not info.of_base
        }
        return super()._read(bound, spec, {**found, **stacks})


class _Held:
    """An adapter's checkpoint."""

    def __init__(self, name: str, stored: StoredModel):
        self.name, self._stored = name, stored
        reader = RecordReader(stored.directory, stored.step)
        self._prefix = f"{stored.name}/params"
        self._step, self._checkpointer = reader.step, Checkpointer(reader.directory)
        self._infos = adapter_infos(stored.model, stored.adapter)

    def check(self) -> None:
        """Refuse one that does not hold what its configuration says."""
        slots = [slot_of(info, self._prefix) for info in self._infos.values()]
        self._checkpointer.check(self._step, slots, exact=True)

    def read(self, info: ParamInfo, bound: BoundPlan) -> jax.Array | None:
        """Its part of an array of all, on the devices; None: it leaves that map out.

        Raises:
            CheckpointError: It holds numbers that are none, which would be everybody's.
        """
        if info.path not in self._infos:
            return None
        rank, at = self._stored.adapter.rank, info.dims.index(ADAPTERS)
        sizes = [rank if dim == RANK else n for dim, n in zip(info.dims, info.shape, strict=True)]
        shape = (*sizes[:at], *sizes[at + 1 :])
        dims = (*info.dims[:at], *info.dims[at + 1 :])
        own = dataclasses.replace(info.on_device(), dims=dims, shape=shape)
        want = slot_of(own, self._prefix, dtype=info.dtype), param_sharding(bound, "params", own)
        given: Any = {"exact": False, "convert": True}
        (found,) = self._checkpointer.restore(self._step, [want], **given)
        if not np.asarray(jax.jit(_all_numbers)(found)):
            raise CheckpointError(
                f"adapter '{self.name}': '{info.path}' of '{self._stored.directory}' step"
                f" {self._step} holds numbers that are none (NaN or infinite) in"
                f" {found.dtype}; give an earlier step"
            )
        return found


def _all_numbers(x: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(x))


def _side_by_side(info: ParamInfo, held: Sequence[_Held], bound: BoundPlan) -> jax.Array:
    """What all adapters have of one map, where the plan wants it."""
    parts = [one.read(info, bound) for one in held]
    stack = functools.partial(_stacked, info.dims, info.shape, info.dtype)
    where = param_sharding(bound, "params", info)
    here = param_sharding(bound, "params", info.on_device())
    return jax.device_put(jax.jit(stack, out_shardings=here)(parts), where)


def _stacked(
    dims: Dims, shape: tuple[int, ...], dtype: Any, parts: list[jax.Array | None]
) -> jax.Array:
    """Parts side by side, narrower ones with zeros behind."""
    at = dims.index(ADAPTERS)
    each = (*shape[:at], *shape[at + 1 :])
    whole = []
    for part in parts:
        if part is None:
            whole.append(jnp.zeros(each, dtype))
            continue
        missing = [(0, n - own) for n, own in zip(each, part.shape, strict=True)]
        whole.append(jnp.pad(part, missing))
    return jnp.stack(whole, axis=at)
