"""Hugging Face folders into checkpoints and back, one tensor at a time."""

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from colossax.checkpoint import RecordReader, RecordWriter, find_checkpoint, slot_of
from colossax.config import Plan, to_json, user_path
from colossax.data import Tokenizer
from colossax.documents import read_json
from colossax.errors import CheckpointError, InputError
from colossax.models.conversion import BLOCK_BYTES, Conversion, Tensor
from colossax.models.hf_folder import CONVERSIONS, Source, by_path, open_folder
from colossax.models.hf_folder import read_params as read_params
from colossax.models.registry import config_from_json, config_to_json, family_of, maker
from colossax.models.safetensors import OutTensor, write_folder
from colossax.nn import describe
from colossax.typing import ParamInfo

PARAMS = "model/params"
MODEL_DOCUMENT, PLAN_DOCUMENT, TOKENIZER_DOCUMENT = "model", "plan", "tokenizer"
MAX_SHARD_BYTES = 5_000_000_000
_TOKENIZER_FILE = "tokenizer.json"
_DTYPE_NAMES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


def import_checkpoint(folder: str | Path, out: str | Path, plan: Plan | None = None) -> None:
    """Write the model in a Hugging Face folder as step 0 of a new checkpoint.

    Everything is checked before anything is written; numbers keep their type.

    Args:
        folder: Holds config.json, safetensors and, if the tokenizer is to come along,
            tokenizer.json.
        out: Directory of the new checkpoint.
        plan: Stored with it for those who load it; without one they compute in the type stored.

    Raises:
        InputError: The folder's config.json is not one of our models, its tokenizer.json cannot
            be read or has more tokens than the model, or `out` is taken.
        WeightsError: Its tensors do not fit, see `open_folder`.

    Cost: host memory of the largest tensor, or of a layer's experts where each is a tensor, and of
    three blocks of 64 MB.
    """
    out, folder = user_path(out, "OUT"), user_path(folder, "HF_DIR", utf8=False)
    source = open_folder(folder)
    documents: dict[str, Any] = {MODEL_DOCUMENT: config_to_json(source.config)}
    if plan is not None:
        documents[PLAN_DOCUMENT] = to_json(plan)
    tokenizer = _read_tokenizer(folder, source.config)
    if tokenizer is not None:
        documents[TOKENIZER_DOCUMENT] = tokenizer.to_json()
    with _left_as_it_was(out), RecordWriter(out) as writer:
        for path, info in source.infos.items():
            slot = slot_of(info, PARAMS)
            writer.declare(
                slot.name,
                slot.shape,
                source.dtypes[path],
                layered=slot.layered,
                experts=slot.experts,
            )
        experts: dict[str, np.ndarray] = {}
        for tensor in source.tensors:
            _copy_in(source, tensor, writer, experts)
        writer.finish(documents)


@contextlib.contextmanager
def _left_as_it_was(out: Path) -> Iterator[None]:
    """Takes a folder away again that nothing came to be in."""
    new = not out.exists()
    try:
        yield
    finally:
        if new:
            with contextlib.suppress(OSError):
                out.rmdir()


def _copy_in(
    source: Source, tensor: Tensor, writer: RecordWriter, experts: dict[str, np.ndarray]
) -> None:
    """Write a tensor; that of one expert when all of its layer are there.

    Args:
        source: To read from.
        tensor: Of it.
        writer: Of the checkpoint.
        experts: By parameter, those of a layer that are there.
    """
    for info, array in zip(tensor.infos, source.ours(tensor), strict=True):
        if tensor.expert is not None:
            shape = info.shape[info.stacked :]
            layer = experts.setdefault(info.path, np.empty(shape, array.dtype))
            layer[tensor.expert] = array
            if not tensor.last_expert:
                continue
            array = experts.pop(info.path)
        writer.write(f"{PARAMS}/{info.path}", array, tensor.layer)


def _read_tokenizer(folder: Path, config: Any) -> Tokenizer | None:
    """The folder's tokenizer, ending documents with the model's own token where it names one."""
    file = folder / _TOKENIZER_FILE
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(file, end=_end_token(file, config.eos))
    if tokenizer.vocab_size > config.vocab:
        raise InputError(
            f"{file}: has {tokenizer.vocab_size} tokens, but config.json gives the model"
            f" {config.vocab}; put the model's own tokenizer there, or none"
        )
    return tokenizer


def _end_token(file: Path, eos: int | None) -> str | None:
    """The text of the token that the model ends with, where the file names one."""
    try:
        added = read_json(file, remedy="copy the file again")["added_tokens"]
        end = next((token["content"] for token in added if token["id"] == eos), None)
    except (InputError, KeyError, TypeError):
        return None  # who reads the tokenizer says what is wrong
    return end if isinstance(end, str) else None


def export_checkpoint(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> RecordReader:
    """Write the parameters of a checkpoint as a Hugging Face folder.

    The folder appears whole or not at all. Numbers keep the type they have in the checkpoint.

    Args:
        checkpoint: Folder of a run, of checkpoints, or of one step.
        folder: To be made.
        step: Which checkpoint; None is the latest.
        max_shard_bytes: Size above which weights are split over several files with an index.

    Returns:
        The checkpoint that was read: its step.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or not of one of our models.
        InputError: The folder holds something, cannot be written, or the format has no place for
            a setting of the model.

    Cost: host memory of the largest tensor and two blocks of 64 MB.
    """
    checkpoint, folder = user_path(checkpoint, "CHECKPOINT"), user_path(folder, "HF_DIR")
    _require_free(folder)
    reader = find_checkpoint(checkpoint, step)
    documents = reader.documents()
    for name, kind in ((MODEL_DOCUMENT, dict), (TOKENIZER_DOCUMENT, str)):
        reader.document(name, kind)
    config = _model_config(reader, documents)
    conversion = CONVERSIONS[family_of(config).name]
    infos = by_path(describe(maker(config)))
    _check_records(reader, infos)
    found = conversion.tensors(infos, config.decoder().layer_kinds)
    tensors = [_out_tensor(reader, tensor) for tensor in found]
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write_texts(part, conversion, config, tensors, documents)
        write_folder(part, tensors, max_shard_bytes=max_shard_bytes)
        os.replace(part, folder)
    except OSError as problem:
        raise InputError(
            f"{folder}: cannot be written ({problem.strerror}); make room or choose another folder"
        ) from problem
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return reader


def _require_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: is there already; name a new folder")


def _model_config(reader: RecordReader, documents: Mapping[str, Any]) -> Any:
    if MODEL_DOCUMENT not in documents:
        raise CheckpointError(
            f"checkpoint step {reader.step} does not say which model it is of; only checkpoints of"
            f" the library's model families can be exported"
        )
    return config_from_json(documents[MODEL_DOCUMENT])


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


def _out_tensor(reader: RecordReader, tensor: Tensor) -> OutTensor:
    dtypes = [reader.records()[f"{PARAMS}/{info.path}"][1] for info in tensor.infos]
    return OutTensor(
        name=tensor.name,
        shape=tensor.shape,
        dtype=functools.reduce(np.promote_types, dtypes),
        blocks=functools.partial(_foreign_blocks, reader, tensor),
    )


def _foreign_blocks(reader: RecordReader, tensor: Tensor) -> Iterator[np.ndarray]:
    place = tuple(at for at in (tensor.layer, tensor.expert) if at is not None)
    arrays = [_read_record(reader, f"{PARAMS}/{info.path}", place) for info in tensor.infos]
    for block in tensor.blocks(arrays[0].dtype.itemsize):
        yield block.foreign(arrays)


def _read_record(reader: RecordReader, name: str, place: tuple[int, ...]) -> np.ndarray:
    """A record, or one layer or expert of it, in blocks: all at once would need twice its bytes.

    Args:
        reader: The checkpoint.
        name: Of the record.
        place: Number of the layer and of the expert, where it is one's.
    """
    shape, dtype = reader.records()[name]
    one = tuple(slice(at, at + 1) for at in place)
    array = np.empty(shape[len(place) :], dtype)
    rows = max(1, array.shape[0] * BLOCK_BYTES // max(1, array.nbytes))
    for first in range(0, array.shape[0], rows):
        part = (slice(first, first + rows), *(slice(None) for _ in array.shape[1:]))
        array[part] = reader.read_region(name, (*one, *part)).reshape(array[part].shape)
    return array


def _write_texts(
    folder: Path,
    conversion: Conversion,
    config: Any,
    tensors: list[OutTensor],
    documents: Mapping[str, Any],
) -> None:
    """config.json, and tokenizer.json where the checkpoint holds one.

    A model that names no token that ends a document has its tokenizer's.
    """
    widest = functools.reduce(np.promote_types, [tensor.dtype for tensor in tensors])
    settings = {**conversion.settings_of(config), "torch_dtype": widest.name}
    if TOKENIZER_DOCUMENT in documents:
        tokenizer = Tokenizer.from_json(documents[TOKENIZER_DOCUMENT])
        if settings.get("eos_token_id") is None:
            settings["eos_token_id"] = tokenizer.eos
        generation = {"eos_token_id": settings["eos_token_id"]}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end}
        (folder / _TOKENIZER_FILE).write_text(tokenizer.definition, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
