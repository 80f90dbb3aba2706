"""Hugging Face folders into checkpoints and back, one tensor at a time."""

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from colossax.checkpoint import RecordReader, RecordWriter, find_checkpoint
from colossax.config import Plan, to_json, user_path
from colossax.data import Chat, Tokenizer
from colossax.data.chats.chat import TEMPLATE_FILE
from colossax.documents import read_json
from colossax.errors import InputError
from colossax.models.adapters.stored import params_of
from colossax.models.conversion import Conversion, Tensor
from colossax.models.conversions import CONVERSIONS
from colossax.models.embedding import write_modules
from colossax.models.hf_folder import Source, open_folder
from colossax.models.hf_folder import read_params as read_params
from colossax.models.packed.kept import KeptCodes
from colossax.models.parameters import (
    CHAT_DOCUMENT,
    MODEL_DOCUMENT,
    PARAMS,
    PLAN_DOCUMENT,
    TOKENIZER_DOCUMENT,
    ModelParams,
    declare,
    left_as_it_was,
    write_checkpoint,
)
from colossax.models.registry import config_to_json, family_of
from colossax.models.safetensors import OutTensor, write_folder
from colossax.models.settings import tells_hidden_states

MAX_SHARD_BYTES = 5_000_000_000
_TOKENIZER_FILE = "tokenizer.json"


def import_checkpoint(folder: str | Path, out: str | Path, plan: Plan | None = None) -> None:
    """Write the model in a Hugging Face folder as step 0 of a new checkpoint.

    Everything is checked before anything is written; numbers keep their type. Beside those of maps
    that the folder has in codes lie the codes, see `KeptCodes`.

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
        if chat := Chat.from_folder(folder):
            documents[CHAT_DOCUMENT] = chat.to_json()
    with left_as_it_was(out), RecordWriter(out) as writer:
        declare(writer, source.infos, source.dtypes)
        codes = KeptCodes(source, writer)
        experts: dict[str, np.ndarray] = {}
        for tensor in source.tensors:
            _copy_in(source, tensor, writer, experts)
            codes.write(tensor)
        writer.finish(documents)


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
    words = config.decoder()
    if not file.is_file() or not words.vocab:
        return None
    tokenizer = Tokenizer.from_file(file, end=_end_token(file, words.eos))
    if tokenizer.vocab_size > words.vocab:
        raise InputError(
            f"{file}: has {tokenizer.vocab_size} tokens, but config.json gives the model"
            f" {words.vocab}; put the model's own tokenizer there, or none"
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
    averaged: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    alter: Callable[[ModelParams], ModelParams] = lambda params: params,
    base: str | Path | None = None,
) -> RecordReader:
    """Write the parameters of a checkpoint as a Hugging Face folder.

    The folder appears whole or not at all. Numbers keep the type they have in the checkpoint.

    Args:
        checkpoint: Folder of a run, of checkpoints, or of one step.
        folder: To be made.
        step: Which checkpoint; None is the latest.
        averaged: Whether to take the averages that the run's optimizer kept of the parameters.
        max_shard_bytes: Size above which weights are split over several files with an index.
        alter: What is written in place of the checkpoint's model; see `colossax.models.altered`.
        base: Of an adapter, which is merged into its base: where that is now; None: where it was.

    Returns:
        The checkpoint that was read: its step.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or not of one of our models.
        InputError: The folder holds something, cannot be written, or the format has no place for
            a setting of the model; or no averages were kept.

    Cost: host memory of the largest tensor and two blocks of 64 MB.
    """
    checkpoint, folder = user_path(checkpoint, "CHECKPOINT"), user_path(folder, "HF_DIR")
    _require_free(folder)
    reader = find_checkpoint(checkpoint, step)
    params = alter(params_of(reader, base, averaged=averaged))
    config, documents = params.config, reader.documents()
    conversion = CONVERSIONS[family_of(config).name].of(config)
    found = conversion.tensors(params.infos, config.decoder().layer_kinds)
    tensors = [_out_tensor(params, tensor) for tensor in found]
    tensors += [_constant(params, name, *one) for name, one in conversion.constant.items()]
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write_texts(part, conversion, config, tensors, documents)
        head = getattr(config, "head", None)
        if head is not None and tells_hidden_states(head):
            write_modules(part, head, config.decoder().embed)
        write_folder(part, tensors, max_shard_bytes=max_shard_bytes)
        os.replace(part, folder)
    except OSError as problem:
        raise InputError(
            f"{folder}: cannot be written ({problem.strerror}); make room or choose another folder"
        ) from problem
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return reader


def copy_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    averaged: bool = False,
    alter: Callable[[ModelParams], ModelParams] = lambda params: params,
    base: str | Path | None = None,
) -> RecordReader:
    """Write the parameters of a checkpoint as step 0 of another, with its tokenizer and plan.

    Args:
        checkpoint: Folder of a run, of checkpoints, or of one step.
        out: Directory of the new checkpoint.
        step: Which checkpoint; None is the latest.
        averaged: Whether to take the averages that the run's optimizer kept of the parameters.
        alter: What is written in place of the checkpoint's model; see `colossax.models.altered`.
        base: Of an adapter, which is merged into its base: where that is now; None: where it was.

    Returns:
        The checkpoint that was read: its step.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or not of one of our models; or `out`
            holds one, or cannot be written.
        InputError: No averages were kept.

    Cost: host memory of the largest parameter of a layer.
    """
    checkpoint, out = user_path(checkpoint, "CHECKPOINT"), user_path(out, "OUT")
    reader = find_checkpoint(checkpoint, step)
    params = alter(params_of(reader, base, averaged=averaged))
    documents = reader.documents()
    kept = (PLAN_DOCUMENT, TOKENIZER_DOCUMENT, CHAT_DOCUMENT)
    write_checkpoint(params, out, {name: documents[name] for name in kept if name in documents})
    return reader


def _require_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: is there already; name a new folder")


def _out_tensor(params: ModelParams, tensor: Tensor) -> OutTensor:
    dtypes = [params.dtypes[info.path] for info in tensor.infos]
    return OutTensor(
        name=tensor.name,
        shape=tensor.shape,
        dtype=functools.reduce(np.promote_types, dtypes),
        blocks=functools.partial(_foreign_blocks, params, tensor),
    )


def _constant(params: ModelParams, name: str, like: str, value: float) -> OutTensor:
    """A tensor that is one number, of the shape and type of a parameter."""
    shape, dtype = params.infos[like].shape, params.dtypes[like]
    return OutTensor(
        name=name, shape=shape, dtype=dtype, blocks=lambda: iter([np.full(shape, value, dtype)])
    )


def _foreign_blocks(params: ModelParams, tensor: Tensor) -> Iterator[np.ndarray]:
    arrays = [params.read(info.path, tensor.layer, tensor.expert) for info in tensor.infos]
    for block in tensor.blocks(arrays[0].dtype.itemsize):
        yield block.foreign(arrays)


def _write_texts(
    folder: Path,
    conversion: Conversion,
    config: Any,
    tensors: list[OutTensor],
    documents: Mapping[str, Any],
) -> None:
    """config.json, and tokenizer.json and its chat template where the checkpoint holds them.

    A model that names no token that ends a document has its tokenizer's.
    """
    widest = functools.reduce(np.promote_types, [tensor.dtype for tensor in tensors])
    settings = {**conversion.settings_of(config), "torch_dtype": widest.name}
    if TOKENIZER_DOCUMENT in documents:
        tokenizer = Tokenizer.from_json(documents[TOKENIZER_DOCUMENT])
        if settings.get("eos_token_id") is None:
            settings["eos_token_id"] = tokenizer.eos
        chat = Chat.from_json(documents.get(CHAT_DOCUMENT))
        ends = list(chat.ends) if len(chat.ends) > 1 else settings["eos_token_id"]
        generation = {"eos_token_id": ends}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end}
        if chat.bos:
            about["bos_token"] = chat.bos
        if chat.template is not None:
            (folder / TEMPLATE_FILE).write_text(chat.template, encoding="utf-8")
        (folder / _TOKENIZER_FILE).write_text(tokenizer.definition, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
