"""A model's parameters wherever they are, read one layer or one expert at a time."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from colossax.checkpoint import RecordReader, RecordWriter, slot_of
from colossax.errors import CheckpointError, InputError
from colossax.models.conversion import BLOCK_BYTES
from colossax.models.hf_folder import by_path
from colossax.models.registry import config_from_json, config_to_json, maker
from colossax.nn import ModelSpec, describe
from colossax.typing import ParamInfo

CODES = "codes"
PARAMS, CODES_PREFIX = "model/params", f"model/{CODES}"
_STATE = "model/optimizer"
_EMA, _SCHEDULE_FREE = f"{_STATE}/average", f"{_STATE}/z"
MODEL_DOCUMENT, PLAN_DOCUMENT, TOKENIZER_DOCUMENT = "model", "plan", "tokenizer"
CHAT_DOCUMENT = "chat"
_DTYPE_NAMES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}

Read = Callable[[str, int | None, int | None], np.ndarray]
"""`(path, layer, expert) -> array`; see `ModelParams.read`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParams:
    """Parameters of a model of a family: none is in memory before it is read.

    Attributes:
        config: Of the family.
        spec: The model, as one segment of layers.
        dtypes: By path.
        read: `(path, layer, expert)`: one parameter; in the layer stack of one layer, numbered
            among those of its kind; and of experts all, or one.
    """

    config: Any
    spec: ModelSpec
    dtypes: Mapping[str, np.dtype]
    read: Read

    @property
    def infos(self) -> dict[str, ParamInfo]:
        """What each parameter is, by path."""
        return by_path(self.spec)

    def tree(self) -> Any:
        """All of them in host memory, in the structure of the model as one segment."""

        def whole(info: ParamInfo) -> np.ndarray:
            if info.first_layer is None or not info.stacked:
                return self.read(info.path, info.first_layer, None)
            rows = range(info.first_layer, info.first_layer + info.shape[0])
            return np.stack([self.read(info.path, row, None) for row in rows])

        return jax.tree.map(whole, self.spec.infos)


def params_of_tree(config: Any, tree: Any) -> ModelParams:
    """Those of a tree of arrays, in the structure of the model as one segment of layers.

    Args:
        config: Of the family.
        tree: As `read_params` gives it.
    """
    spec = describe(maker(config))
    infos, arrays = jax.tree.leaves(spec.infos), jax.tree.leaves(tree)
    layers: dict[tuple[str, int | None], Any] = {}
    for info, x in zip(infos, arrays, strict=True):
        if not info.stacked or info.first_layer is None:
            layers[info.path, info.first_layer] = x
            continue
        layers |= {(info.path, info.first_layer + row): one for row, one in enumerate(x)}

    def read(path: str, layer: int | None, expert: int | None) -> np.ndarray:
        x = layers[path, layer]
        return np.asarray(x if expert is None else x[expert])

    dtypes = {path: np.dtype(x.dtype) for (path, _), x in layers.items()}
    return ModelParams(config=config, spec=spec, dtypes=dtypes, read=read)


def params_of_checkpoint(reader: RecordReader) -> ModelParams:
    """Those of a checkpoint.

    Raises:
        CheckpointError: It is damaged, or not of one of our models.
    """
    documents = reader.documents()
    for name, kind in ((MODEL_DOCUMENT, dict), (TOKENIZER_DOCUMENT, str)):
        reader.document(name, kind)
    if MODEL_DOCUMENT not in documents:
        raise CheckpointError(
            f"checkpoint step {reader.step} does not say which model it is of; only checkpoints of"
            f" the library's model families can be exported"
        )
    config = config_from_json(documents[MODEL_DOCUMENT])
    spec = describe(maker(config))
    infos = by_path(spec)
    _check_records(reader, infos)

    def read(path: str, layer: int | None, expert: int | None) -> np.ndarray:
        place = tuple(at for at in (layer, expert) if at is not None)
        return read_record(reader, f"{PARAMS}/{path}", place)

    dtypes = {path: reader.records()[f"{PARAMS}/{path}"][1] for path in infos}
    return ModelParams(config=config, spec=spec, dtypes=dtypes, read=read)


def params_of_averages(reader: RecordReader) -> ModelParams:
    """What `optim.averaged` makes of the state that a checkpoint holds; numbers keep their type.

    Of what does not learn there is no average: it is as it is.

    Raises:
        CheckpointError: It is damaged, or not of one of our models.
        InputError: The optimizer kept no averages.

    Cost: of a schedule-free one two records are read for each parameter.
    """
    params = params_of_checkpoint(reader)
    return dataclasses.replace(params, read=read_averages(reader, params.read, params.dtypes))


def read_averages(reader: RecordReader, plain: Read, dtypes: Mapping[str, np.dtype]) -> Read:
    """How the averages are read that a checkpoint's state has in place of parameters.

    Args:
        reader: The checkpoint.
        plain: How they themselves are.
        dtypes: What they become, by path.

    Raises:
        InputError: The optimizer kept no averages.
    """
    records, known = reader.records(), (_EMA, _SCHEDULE_FREE)
    kept = next((k for k in known if any(f"{k}/{path}" in records for path in dtypes)), None)
    if kept is None:
        raise InputError(
            f"averages: the optimizer of {reader.directory} step {reader.step} keeps none; leave"
            " --averaged out, or train with --optimizer.ema 0.999"
        )
    if int(reader.read(f"{_STATE}/count")) == 0:
        return plain
    share = 0.0 if kept == _EMA else float(reader.read(f"{_STATE}/share"))

    def read(path: str, layer: int | None, expert: int | None) -> np.ndarray:
        if f"{kept}/{path}" not in records:
            return plain(path, layer, expert)
        place = tuple(at for at in (layer, expert) if at is not None)
        found = read_record(reader, f"{kept}/{path}", place)
        if kept == _SCHEDULE_FREE:
            y = plain(path, layer, expert).astype(np.float32)
            found = (y - np.float32(1 - share) * found) / np.float32(share)
        return found.astype(dtypes[path])

    return read


def write_checkpoint(
    params: ModelParams, out: str | Path, documents: Mapping[str, Any] | None = None
) -> None:
    """Write them as step 0 of a new checkpoint, which training and generation read.

    Args:
        params: Numbers keep their type.
        out: Directory of the checkpoint.
        documents: Beside that of the model: `plan` and `tokenizer`.

    Raises:
        CheckpointError: The directory holds a checkpoint, or cannot be written.

    Cost: host memory of the largest parameter of a layer.
    """
    out, infos = Path(out), params.infos
    documents = {**(documents or {}), MODEL_DOCUMENT: config_to_json(params.config)}
    with left_as_it_was(out), RecordWriter(out) as writer:
        declare(writer, infos, params.dtypes)
        for path, info in infos.items():
            rows = [None] if info.first_layer is None else range(info.total_layers or 0)
            for row in rows:
                array = np.ascontiguousarray(params.read(path, row, None))
                writer.write(f"{PARAMS}/{path}", array, row)
        writer.finish(documents)


def declare(
    writer: RecordWriter, infos: Mapping[str, ParamInfo], dtypes: Mapping[str, Any]
) -> None:
    """Say of each parameter what its record will be: layers, and experts, in blocks of their own.

    Args:
        writer: Of the checkpoint.
        infos: By path.
        dtypes: Likewise.
    """
    for path, info in infos.items():
        slot = slot_of(info, PARAMS)
        writer.declare(
            slot.name, slot.shape, dtypes[path], layered=slot.layered, experts=slot.experts
        )


@contextlib.contextmanager
def left_as_it_was(out: Path) -> Iterator[None]:
    """Takes a folder away again that nothing came to be in."""
    new = not out.exists()
    try:
        yield
    finally:
        if new:
            with contextlib.suppress(OSError):
                out.rmdir()


def _check_records(reader: RecordReader, infos: Mapping[str, ParamInfo]) -> None:
    """Refuse a checkpoint whose parameters are not those of its model."""
    slots = {slot.name: slot for slot in (slot_of(info, PARAMS) for info in infos.values())}
    names = {name for name in reader.records() if name.startswith(f"{PARAMS}/")}
    for name in sorted(slots.keys() ^ names):
        where = "has besides" if name in names else "lacks"
        raise CheckpointError(
            f"checkpoint step {reader.step} {where} '{name}' for the model it names; export one"
            f" that was saved whole"
        )
    for name, slot in slots.items():
        shape, dtype = reader.records()[name]
        if shape != slot.shape or dtype.name not in _DTYPE_NAMES:
            raise CheckpointError(
                f"checkpoint step {reader.step}: '{name}' is {dtype.name}{list(shape)} where its"
                f" model has {list(slot.shape)} of a floating type; export one that was saved whole"
            )


def read_record(reader: RecordReader, name: str, place: tuple[int, ...]) -> np.ndarray:
    """A record, or one layer or expert of it, in blocks: all at once would need twice its bytes.

    Args:
        reader: The checkpoint.
        name: Of the record.
        place: Number of the layer and of the expert, where it is one's.
    """
    shape, dtype = reader.records()[name]
    one = tuple(slice(at, at + 1) for at in place)
    array = np.empty(shape[len(place) :], dtype)
    if not array.shape and not place:
        return np.asarray(reader.read(name))
    rows = max(1, array.shape[0] * BLOCK_BYTES // max(1, array.nbytes))
    for first in range(0, array.shape[0], rows):
        part = (slice(first, first + rows), *(slice(None) for _ in array.shape[1:]))
        array[part] = reader.read_region(name, (*one, *part)).reshape(array[part].shape)
    return array
