"""An adapter and the base that it learned beside, read one layer at a time."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from colossax.checkpoint import RecordReader, slot_of
from colossax.checkpoint.base import base_of
from colossax.config import from_json
from colossax.errors import CheckpointError
from colossax.models.adapters.quantising import through_codes
from colossax.models.hf_folder import by_path
from colossax.models.parameters import (
    PARAMS,
    ModelParams,
    Read,
    params_of_averages,
    params_of_checkpoint,
    read_averages,
    read_record,
)
from colossax.models.registry import config_from_json, maker
from colossax.nn import AdapterConfig, HeadConfig, describe, with_adapter, with_new_head
from colossax.nn.decoder.head import OWN_HEAD
from colossax.nn.quantised.codes import Packing
from colossax.typing import ParamInfo

ADAPTER_DOCUMENT = "adapter"
DOWN, UP, STRETCH = "down", "up", "stretch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """A model's adapter; none of its numbers is in memory before it is read.

    Attributes:
        adapter: Its configuration.
        base: The model that it is of.
        reader: The checkpoint that holds it.
        averaged: Whether the averages are meant that the run's optimizer kept of it.
        head: The model's own head, where the checkpoint holds one that learned as a whole.
    """

    adapter: AdapterConfig
    base: ModelParams
    reader: RecordReader
    averaged: bool = False
    head: HeadConfig | None = None

    @property
    def config(self) -> Any:
        """Of the model that both are together."""
        if self.head is None:
            return self.base.config
        return dataclasses.replace(self.base.config, head=self.head)

    @functools.cached_property
    def infos(self) -> Mapping[str, ParamInfo]:
        """What is of the adapter, by path."""
        return adapter_infos(self.config, self.adapter, new_head=self.head is not None)

    @functools.cached_property
    def read(self) -> Read:
        """One of its parameters, or a layer of it; see `ModelParams.read`."""

        def plain(path: str, layer: int | None, expert: int | None) -> np.ndarray:
            place = tuple(at for at in (layer, expert) if at is not None)
            return read_record(self.reader, f"{PARAMS}/{path}", place)

        if not self.averaged:
            return plain
        return read_averages(self.reader, plain, dict.fromkeys(self.infos, np.dtype("float32")))

    @functools.cached_property
    def packings(self) -> Mapping[str, Packing]:
        """How matrices of the base were kept while the adapter learned, by path; else nothing."""
        return {
            info.stood_at: info.quantised.of
            for info in _described(self.config, self.adapter, self.head is not None).values()
            if info.quantised is not None and info.stood_at
        }

    def parts(self, path: str, layer: int | None) -> dict[str, np.ndarray]:
        """Of one matrix of the base, in float32: `down`, `up`, of DoRA `stretch`; else nothing."""
        return {
            name: self.read(f"{path}/{name}", layer, None).astype(np.float32)
            for name in (DOWN, UP, STRETCH)
            if f"{path}/{name}" in self.infos
        }

    def merged(self) -> ModelParams:
        """The base with the adapter in its matrices: a model as any other, in the base's types.

        Matrices that were kept in codes are what those stand for.
        """

        def read(path: str, layer: int | None, expert: int | None) -> np.ndarray:
            if path in self.infos:
                return self.read(path, layer, expert)
            own = self.base.read(path, layer, expert)
            parts = self.parts(path, layer) if expert is None else {}
            packing = self.packings.get(path)
            if packing is not None:
                own = through_codes(packing, own)
            if not parts:
                return own
            return with_parts(own.astype(np.float32), parts, self.adapter.scale).astype(own.dtype)

        if self.head is None:
            return dataclasses.replace(self.base, read=read)
        spec = describe(maker(self.config))
        held = self.reader.records()
        dtypes = {
            path: held[f"{PARAMS}/{path}"][1] if path in self.infos else self.base.dtypes[path]
            for path in by_path(spec)
        }
        return ModelParams(config=self.config, spec=spec, dtypes=dtypes, read=read)


def adapter_infos(
    config: Any, adapter: AdapterConfig, *, new_head: bool = False
) -> dict[str, ParamInfo]:
    """The parameters of an adapter of a model, by path; with `new_head` the model's head too."""
    infos = _described(config, adapter, new_head)
    return {path: info for path, info in infos.items() if not info.of_base}


def _described(config: Any, adapter: AdapterConfig, new_head: bool) -> dict[str, ParamInfo]:
    make_model = with_new_head(maker(config)) if new_head else maker(config)
    return by_path(describe(with_adapter(make_model, adapter)))


def learned_head(reader: RecordReader) -> bool:
    """Whether a checkpoint of an adapter holds its model's own head too, and no pairs beside it."""
    own = (name for name in reader.records() if name.startswith(f"{PARAMS}/{OWN_HEAD}/"))
    return any(name.rpartition("/")[2] not in (DOWN, UP, STRETCH) for name in own)


def with_parts(w: np.ndarray, parts: Mapping[str, np.ndarray], scale: float) -> np.ndarray:
    """`W + scale A B`, of DoRA with columns of the wanted lengths; all in float32."""
    whole = w + scale * np.tensordot(parts[DOWN], parts[UP], axes=1)
    if STRETCH not in parts:
        return whole
    axes = tuple(range(parts[DOWN].ndim - 1))
    own, found = lengths(w, axes), lengths(whole, axes)
    wanted = np.where(found > 0, own + parts[STRETCH], 1)  # a column of zeros stays
    return whole * (wanted / np.where(found > 0, found, 1))


def lengths(w: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Of the columns of a matrix, whose first dims are of its input."""
    return np.sqrt(np.sum(np.square(w, dtype=np.float32), axis=axes))


def adapter_of_checkpoint(
    reader: RecordReader, base: str | Path | None = None, *, averaged: bool = False
) -> StoredAdapter | None:
    """What a checkpoint holds of an adapter; None where it is of a whole model.

    Args:
        reader: The checkpoint.
        base: Where its base is now; None: where it was.
        averaged: Whether the averages of it are wanted that the run's optimizer kept.

    Raises:
        CheckpointError: The base is gone or another one, or records do not fit.
    """
    said = reader.document(ADAPTER_DOCUMENT, dict)
    if said is None:
        return None
    adapter = from_json(AdapterConfig, said, where="adapter of the checkpoint")
    there, _ = base_of(reader, base)
    head = config_from_json(reader.document("model", dict)).head if learned_head(reader) else None
    found = StoredAdapter(
        adapter=adapter,
        base=params_of_checkpoint(there),
        reader=reader,
        averaged=averaged,
        head=head,
    )
    for info in found.infos.values():
        slot = slot_of(info, PARAMS)
        held = reader.records().get(slot.name)
        if held is None or held[0] != slot.shape:
            shape = "none" if held is None else f"one of shape {list(held[0])}"
            raise CheckpointError(
                f"checkpoint step {reader.step}: its adapter has '{slot.name}' of shape"
                f" {list(slot.shape)}, and there is {shape}; give one that was saved whole"
            )
    return found


def params_of(
    reader: RecordReader, base: str | Path | None = None, *, averaged: bool = False
) -> ModelParams:
    """The parameters of a checkpoint's model; an adapter's merged into those of its base.

    Args:
        reader: The checkpoint.
        base: Of an adapter: where its base is now; None: where it was.
        averaged: Whether the averages that the run's optimizer kept take the place of what learned.

    Raises:
        CheckpointError: It is damaged, or not of one of our models; the base is gone or another.
        InputError: No averages were kept.
    """
    found = adapter_of_checkpoint(reader, base, averaged=averaged)
    if found is not None:
        return found.merged()
    return (params_of_averages if averaged else params_of_checkpoint)(reader)
