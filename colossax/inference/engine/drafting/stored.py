"""A trained drafter, read beside the model that it drafts for."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from colossax.checkpoint import RecordReader, find_checkpoint, slot_of
from colossax.checkpoint.base import BASE, checksum
from colossax.config import BoundPlan, OffloadConfig, Segment, from_json
from colossax.documents import member
from colossax.errors import CheckpointError
from colossax.inference.engine import GlideDrafter
from colossax.inference.loaded import LoadedModel
from colossax.models.adapters.quantising import read_with_codes
from colossax.nn import DrafterConfig, ModelSpec, describe, drafter_maker
from colossax.nn.drafting.drafter import DRAFTER
from colossax.sharding import param_sharding, use, validate
from colossax.typing import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedDrafter:
    """A drafter with its parameters on the devices of its target.

    Attributes:
        spec: The `nn.Drafter` without arrays, described under `bound`.
        bound: The target's plan and devices; each layer has arrays of its own.
        params: Laid out by `bound`.
        config: What it is.
    """

    spec: ModelSpec
    bound: BoundPlan
    params: Params
    config: DrafterConfig

    def drafter(self, tokens: int | None = None, *, nodes: int | None = None) -> GlideDrafter:
        """One for an engine of the target; see `GlideDrafter`.

        Args:
            tokens: How many it guesses, one behind another; default as many as it learned to.
            nodes: See `GlideDrafter`.
        """
        given = self.spec, self.bound, self.params
        return GlideDrafter(*given, self.config.block if tokens is None else tokens, nodes=nodes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredDrafter:
    """What a checkpoint says of a drafter, before any parameter is read.

    Attributes:
        reader: The checkpoint.
        config: What it is.
        target: `checksum` of the parameters that it learned beside.
        place: Where those were.
    """

    reader: RecordReader
    config: DrafterConfig
    target: int
    place: str

    def beside(self, target: LoadedModel) -> LoadedDrafter:
        """Read it onto the devices of the model that it drafts for.

        Args:
            target: That model, in whatever type or form its matrices are.

        Raises:
            CheckpointError: It learned beside another one, as a model with an adapter is; or
                records are missing or damaged.
        """
        where = f"checkpoint '{self.reader.directory}' step {self.reader.step}"
        theirs, name = target.origin
        if target.adapter or checksum(theirs, name) != self.target:
            kind = "an adapter of " if target.adapter else ""
            raise CheckpointError(
                f"{where} is a drafter of '{self.place}', and it is to draft for {kind}"
                f"'{theirs.directory}' step {theirs.step}, whose parameters differ; give that"
                " model, or train a drafter for this one"
            )
        own = (Segment(count=1),) * self.config.layers
        bound = target.bound.replace(segments=own, offload=OffloadConfig())
        with use(bound):
            spec = describe(drafter_maker(self.config, target.config))
        validate(bound, spec.infos)
        return LoadedDrafter(
            spec=spec, bound=bound, params=self._read(bound, spec), config=self.config
        )

    def _read(self, bound: BoundPlan, spec: ModelSpec) -> Params:
        infos, structure = jax.tree.flatten(spec.infos)
        prefix, dtype = f"{DRAFTER}/params", bound.plan.precision.params
        wants = [
            (
                slot_of(info, prefix, dtype=info.at_rest(dtype)),
                param_sharding(bound, "params", info),
            )
            for info in infos
        ]
        arrays = read_with_codes(self.reader, prefix, infos, wants, bound, exact=False)
        return jax.tree.unflatten(structure, arrays)


def holds_drafter(path: str | Path) -> bool:
    """Whether a run or checkpoint is a drafter's; arguments as of `open_drafter`."""
    reader = find_checkpoint(path, None)
    return reader.document(DRAFTER, dict) is not None


def open_drafter(path: str | Path, *, step: int | None = None) -> StoredDrafter:
    """Read what a run of a drafter, as of the recipe `glide_tiny`, left.

    Args:
        path: Folder of a run, of checkpoints (the latest is taken), or of one step.
        step: Which checkpoint of a folder of several; None is the latest.

    Raises:
        CheckpointError: There is none, it is damaged, or holds no drafter.
    """
    reader = find_checkpoint(path, step)
    where = f"checkpoint '{reader.directory}' step {reader.step}"
    said: Any = reader.document(DRAFTER, dict)
    base: Any = reader.document(BASE, dict)
    if said is None or base is None:
        raise CheckpointError(
            f"{where} holds no drafter; give one that colossax train glide_tiny wrote"
        )
    try:
        fields, target = member(said, "config", dict), member(base, "checksum", int)
        place = member(base, "path", str)
    except ValueError as problem:
        raise CheckpointError(f"{where}: {problem}; restore it from a copy") from problem
    config = from_json(DrafterConfig, fields, where="drafter of the checkpoint")
    return StoredDrafter(reader=reader, config=config, target=target, place=place)
