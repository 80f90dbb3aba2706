"""Which tensors of a folder are stored in codes, by what its config.json says."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from colossax.errors import InputError, WeightsError
from colossax.models.conversion import Conversion, Tensor
from colossax.models.mxfp4 import MXFP4
from colossax.models.packed.compressed import Compressed
from colossax.models.packed.gptq import AWQ, GPTQ
from colossax.models.packed.matrix import WEIGHT, Packed
from colossax.models.packed.settings import CONFIG
from colossax.models.safetensors import DTYPES, Reader
from colossax.models.settings import checked

_FORMATS = {"gptq": GPTQ, "awq": AWQ, "compressed-tensors": Compressed}

Format = GPTQ | AWQ | Compressed | None
"""How matrices are stored; None: as what they are, or as MXFP4 where a family has that."""


def format_of(settings: Mapping[str, Any], conversion: Conversion) -> Format:
    """How the matrices of a folder are stored.

    Args:
        settings: Its config.json.
        conversion: Its family.

    Raises:
        InputError: In a way that is not read.
    """
    said = checked(CONFIG, settings.get(CONFIG), dict | None)
    if said is None or conversion.packed:
        return None  # a family with a form of its own has looked at what is said
    method = said.get("quant_method")
    known = _FORMATS.get(method) if isinstance(method, str) else None
    if known is None:
        raise InputError(
            f"config.json: {CONFIG} with quant_method = {method!r} is not supported; only"
            f" {', '.join(_FORMATS)} are: give the model in floats, or so quantised"
        )
    return known.of(said)


def packed_among(
    form: Format,
    conversion: Conversion,
    tensors: Sequence[Tensor],
    names: Mapping[str, str],
    reader: Reader,
) -> tuple[dict[str, Packed], set[str]]:
    """Tensors that are stored in codes, and the full names of what they are stored as.

    Args:
        form: How.
        conversion: The family.
        tensors: What is to be read.
        names: Name in the files per full name.
        reader: The files.

    Raises:
        WeightsError: What is stored does not hold the tensor.
    """
    if form is None:
        return MXFP4.among(tensors, names, reader) if conversion.packed else ({}, set())
    found: dict[str, Packed] = {}
    taken: set[str] = set()
    for tensor in tensors:
        stem = tensor.name.removesuffix(WEIGHT)
        if stem == tensor.name or f"{stem}{form.needed}" not in names:
            continue
        files = {part: names[stem + part] for part in form.parts if stem + part in names}
        found[tensor.name] = form.matrix(tensor, files, reader)
        taken |= {stem + part for part in files}
    wanted = {tensor.name for tensor in tensors}
    for name in found:
        bias = f"{name.removesuffix(WEIGHT)}bias"
        if bias in names.keys() - wanted and reader.tensors[names[bias]].dtype in DTYPES:
            _check_nothing(reader, names[bias])
            taken.add(bias)
    return found, taken


def _check_nothing(reader: Reader, name: str) -> None:
    """Some files give each matrix a bias, of zeros where the model has none."""
    if np.any(reader.read(name)):
        raise WeightsError(
            f"{name}: is not zero, and config.json gives its matrix no bias; correct config.json or"
            " the weights"
        )
