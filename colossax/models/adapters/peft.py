"""Folders of `peft`: adapter_config.json and adapter_model.safetensors."""

import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from colossax.checkpoint import RecordReader, RecordWriter, find_checkpoint
from colossax.checkpoint.base import BASE, base_document
from colossax.config import to_json, user_path
from colossax.documents import read_json
from colossax.errors import CheckpointError, InputError, WeightsError
from colossax.models.adapters.maps import AdapterMap, map_of
from colossax.models.adapters.stored import (
    ADAPTER_DOCUMENT,
    DOWN,
    STRETCH,
    UP,
    StoredAdapter,
    adapter_infos,
    adapter_of_checkpoint,
    lengths,
)
from colossax.models.conversions import CONVERSIONS
from colossax.models.parameters import (
    CHAT_DOCUMENT,
    MODEL_DOCUMENT,
    PARAMS,
    PLAN_DOCUMENT,
    TOKENIZER_DOCUMENT,
    ModelParams,
    declare,
    left_as_it_was,
    params_of_checkpoint,
)
from colossax.models.registry import config_to_json, family_of
from colossax.models.safetensors import OutTensor, Reader, write_file
from colossax.nn import AdapterConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_LEFT_OUT = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "lora_bias": (None, False),
    "megatron_config": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "lora_ga_config": (None,),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Settings with the values that leave a matrix and a narrow pair of one rank and scale."""
_READ = {
    "r": None,
    "lora_alpha": None,
    "use_rslora": False,
    "use_dora": False,
    "lora_dropout": 0.0,
}
"""Settings that are read, with what they are where a file leaves them out."""
_SILENT = frozenset(
    "peft_type task_type peft_version auto_mapping base_model_name_or_path revision inference_mode"
    " target_modules exclude_modules layers_to_transform layers_pattern fan_in_fan_out"
    " megatron_core qalora_group_size loftq_config eva_config corda_config ensure_weight_tying"
    " runtime_config".split()
)
"""Settings that say nothing of the maps beyond what the tensors and the settings above say."""


def export_peft(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    base: str | Path | None = None,
    averaged: bool = False,
) -> RecordReader:
    """Write a checkpoint's adapter as a folder that `peft` loads.

    The folder appears whole or not at all.

    Args:
        checkpoint: Folder of a run, of checkpoints, or of one step.
        folder: To be made.
        step: Which checkpoint; None is the latest.
        base: Where its base is now; None: where it was.
        averaged: Whether to take the averages that the run's optimizer kept of it.

    Returns:
        The checkpoint that was read.

    Raises:
        CheckpointError: It holds no adapter, or its base cannot be read.
        InputError: The format has no place for it, or the folder cannot be written.
    """
    checkpoint, folder = user_path(checkpoint, "CHECKPOINT"), user_path(folder, "PEFT_DIR")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: is there already; name a new folder")
    reader = find_checkpoint(checkpoint, step)
    stored = adapter_of_checkpoint(reader, base, averaged=averaged)
    if stored is None:
        raise CheckpointError(
            f"checkpoint '{reader.directory}' step {reader.step} holds a whole model and no"
            " adapter; export it as a Hugging Face folder"
        )
    maps = _maps_with(stored)
    tensors = [tensor for one in maps for tensor in _tensors(stored, one)]
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        text = json.dumps(_settings(stored, maps), indent=2, sort_keys=True)
        (part / CONFIG_FILE).write_text(f"{text}\n")
        write_file(part / WEIGHTS_FILE, tensors)
        os.replace(part, folder)
    except OSError as problem:
        raise InputError(
            f"{folder}: cannot be written ({problem.strerror}); make room or choose another folder"
        ) from problem
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return reader


def is_peft(folder: Path) -> bool:
    """Whether a folder holds an adapter; one that cannot be looked into does not."""
    try:
        return (folder / CONFIG_FILE).is_file()
    except OSError:
        return False


def import_peft(folder: str | Path, out: str | Path, base: str | Path) -> None:
    """Write the adapter in a folder of `peft` as step 0 of a new checkpoint.

    Args:
        folder: Holds adapter_config.json and adapter_model.safetensors.
        out: Directory of the new checkpoint.
        base: Checkpoint of the model that it is of, which stays where it is.

    Raises:
        InputError: A setting asks for what an adapter here has not.
        WeightsError: Tensors are missing, left over, of another shape, or of another base.
        CheckpointError: The base cannot be read.
    """
    out, folder = user_path(out, "OUT"), user_path(folder, "PEFT_DIR", utf8=False)
    settings = _read_settings(folder / CONFIG_FILE)
    there = find_checkpoint(user_path(base, "--base"))
    params = params_of_checkpoint(there)
    reader = Reader(folder, (folder / WEIGHTS_FILE,))
    held = _held(folder, reader, _maps(params), dora=settings["use_dora"])
    in_layers = all(one.path.startswith("layers/") for one in held)
    drops = in_layers and not settings["use_dora"]  # nothing else here drops what it reads
    adapter = AdapterConfig(
        rank=settings["r"],
        alpha=float(settings["lora_alpha"]),
        dropout=float(settings["lora_dropout"]) if drops else 0.0,
        targets=",".join(dict.fromkeys(_target(one.path, params.config) for one in held)),
        rslora=settings["use_rslora"],
        dora=settings["use_dora"],
    )
    infos = adapter_infos(params.config, adapter)
    _check_whole(folder, infos, held)
    documents = {
        MODEL_DOCUMENT: config_to_json(params.config),
        ADAPTER_DOCUMENT: to_json(adapter),
        BASE: base_document(there, PARAMS.split("/")[0], out),
    }
    known = there.documents()
    kept = (PLAN_DOCUMENT, TOKENIZER_DOCUMENT, CHAT_DOCUMENT)
    documents |= {n: known[n] for n in kept if n in known}
    with left_as_it_was(out), RecordWriter(out) as writer:
        declare(writer, infos, dict.fromkeys(infos, np.dtype("float32")))
        for one in held:
            for name, array in _read(reader, one, params, adapter).items():
                writer.write(f"{PARAMS}/{one.path}/{name}", array, one.layer)
        writer.finish(documents)


def _maps(params: ModelParams) -> Iterator[AdapterMap]:
    """Matrices of a model that are tensors of their own there."""
    conversion = CONVERSIONS[family_of(params.config).name].of(params.config)
    for tensor in conversion.tensors(params.infos, params.config.decoder().layer_kinds):
        if (found := map_of(tensor)) is not None:
            yield found


def _maps_with(stored: StoredAdapter) -> list[AdapterMap]:
    """Those that have a pair; refuses pairs for which there is no place."""
    if stored.head is not None:
        raise InputError(
            "export: the model's own head learned as a whole, and a folder of peft holds pairs"
            " alone; export the merged model, with --merge"
        )
    adapted = {path.rpartition("/")[0] for path in stored.infos}
    maps = [one for one in _maps(stored.base) if one.path in adapted]
    for path in sorted(adapted - {one.path for one in maps}):
        raise InputError(
            f"export: peft has no pair of its own for '{path}', which a {_family(stored)} keeps"
            " together with others; export the merged model, with --merge"
        )
    return maps


def _family(stored: StoredAdapter) -> str:
    return family_of(stored.base.config).name


def _tensors(stored: StoredAdapter, one: AdapterMap) -> Iterator[OutTensor]:
    (ins, outs), rank = one.shape, stored.adapter.rank
    shapes: dict[str, tuple[int, ...]] = {_A: (rank, ins), _B: (outs, rank)}
    if stored.adapter.dora:
        shapes[_MAGNITUDE] = (outs,)
    for suffix, shape in shapes.items():
        yield OutTensor(
            name=f"{_PREFIX}{one.name}{suffix}",
            shape=shape,
            dtype=np.dtype("float32"),
            blocks=functools.partial(_blocks, stored, one, suffix),
        )


def _blocks(stored: StoredAdapter, one: AdapterMap, suffix: str) -> Iterator[np.ndarray]:
    parts = stored.parts(one.path, one.layer)
    if suffix == _MAGNITUDE:
        w = stored.base.read(one.path, one.layer, None).astype(np.float32)
        yield one.vector(lengths(w, tuple(range(len(one.ins)))) + parts[STRETCH])
    else:
        yield np.ascontiguousarray(one.pair(parts[DOWN], parts[UP])[suffix == _B])


def _settings(stored: StoredAdapter, maps: list[AdapterMap]) -> dict[str, Any]:
    """What adapter_config.json says."""
    ours, names = {one.name for one in maps}, {one.name for one in _maps(stored.base)}
    short = {name.rpartition(".")[2] for name in ours}
    others = {name.rpartition(".")[2] for name in names - ours}
    adapter = stored.adapter
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted(ours if short & others else short),
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "inference_mode": True,
    }


def _read_settings(file: Path) -> dict[str, Any]:
    """Settings that are ours, refusing others that say something."""
    found = read_json(file, remedy="copy the file again")
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        kind = found.get("peft_type") if isinstance(found, dict) else found
        raise InputError(f"{file}: peft_type is {kind!r}, and LORA alone is read; give one of that")
    for name, allowed in _LEFT_OUT.items():
        if name in found and found[name] not in allowed:
            raise InputError(
                f"{file}: {name} = {found[name]!r} is not supported; only"
                f" {' or '.join(map(repr, allowed))} is"
            )
    for name, value in found.items():
        known = name in _READ or name in _LEFT_OUT or name in _SILENT
        if not known and value not in (None, [], {}):
            raise InputError(
                f"{file}: {name} = {value!r} is a setting that is not known here; take it out if"
                " the adapter is the same map without it, or export it merged from where it was"
                " trained"
            )
    number = (int, float)
    kinds = {"r": int, "lora_alpha": number, "use_rslora": bool, "use_dora": bool}
    kinds["lora_dropout"] = number
    settings = {name: found.get(name, default) for name, default in _READ.items()}
    for name, kind in kinds.items():
        if not isinstance(settings[name], kind) or settings[name] == 0 and name == "r":
            raise InputError(f"{file}: {name} is {settings[name]!r}; copy the file again")
    return settings


def _held(
    folder: Path, reader: Reader, maps: Iterator[AdapterMap], *, dora: bool
) -> list[AdapterMap]:
    """Matrices of the base that the folder has a pair for; refuses tensors of others."""
    rest, held = dict(reader.tensors), []
    suffixes = (_A, _B, _MAGNITUDE) if dora else (_A, _B)
    for one in maps:
        names = [f"{_PREFIX}{one.name}{suffix}" for suffix in suffixes]
        found = [rest.pop(name, None) for name in names]
        if any(found):
            _check_shapes(folder, one, dict(zip(names, found, strict=True)))
            held.append(one)
    for name in rest:
        raise WeightsError(
            f"{folder / WEIGHTS_FILE}: '{name}' belongs to no matrix of the base, or is of one that"
            " is no map of its own here; give the base that the adapter was trained beside"
        )
    if not held:
        raise WeightsError(f"{folder / WEIGHTS_FILE}: holds no adapter; copy the file again")
    return held


def _check_shapes(folder: Path, one: AdapterMap, found: Mapping[str, Any]) -> None:
    ins, outs = one.shape
    for (name, tensor), size in zip(found.items(), (ins, outs, outs), strict=False):
        at = 1 if name.endswith(_A) else 0
        if tensor is None or at >= len(tensor.shape) or tensor.shape[at] != size:
            shape = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise WeightsError(
                f"{folder / WEIGHTS_FILE}: '{name}' is {shape}, and the base's matrix has {ins}"
                f" inputs and {outs} outputs; give the base that the adapter was trained beside"
            )


def _target(path: str, config: Any) -> str:
    """The name of a map in its layer, or outside of all; see `AdapterConfig.targets`."""
    parts = path.split("/")[:-1]
    if parts[0] != "layers":
        return "/".join(parts)
    return "/".join(parts[2 if config.decoder().layer_kinds else 1 :])


def _check_whole(folder: Path, infos: Mapping[str, Any], held: list[AdapterMap]) -> None:
    """Every layer has what one of them has."""
    layers: dict[str, int] = {}
    for one in held:
        layers[one.path] = layers.get(one.path, 0) + 1
    for path, info in infos.items():
        found, wanted = layers.get(path.rpartition("/")[0], 0), info.total_layers or 1
        if found != wanted:
            raise WeightsError(
                f"{folder / WEIGHTS_FILE}: has pairs for {found} of the {wanted} matrices"
                f" '{path.rpartition('/')[0]}'; give an adapter of all layers"
            )


def _read(
    reader: Reader, one: AdapterMap, params: ModelParams, adapter: AdapterConfig
) -> dict[str, np.ndarray]:
    """Our parts of a pair, in float32."""

    def read(suffix: str) -> np.ndarray:
        return reader.read(f"{_PREFIX}{one.name}{suffix}").astype(np.float32)

    a, b = read(_A), read(_B)
    if len(a) != adapter.rank or b.shape[1] != adapter.rank:
        raise WeightsError(
            f"{reader.folder}: the pair of '{one.name}' is of rank {len(a)}, and {CONFIG_FILE} says"
            f" {adapter.rank}; copy both files again"
        )
    down, up = one.ours(a, b)
    found = {DOWN: np.ascontiguousarray(down), UP: np.ascontiguousarray(up)}
    if adapter.dora:
        w = params.read(one.path, one.layer, None).astype(np.float32)
        found[STRETCH] = one.our_vector(read(_MAGNITUDE)) - lengths(w, tuple(range(len(one.ins))))
    return found
