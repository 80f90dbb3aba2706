"""Checkpoints that hold what learned alone: the rest is of another one, their base."""

import zlib
from pathlib import Path
from typing import Any

from colossax.checkpoint.records import RecordReader, find_checkpoint
from colossax.documents import member
from colossax.errors import CheckpointError

BASE = "base"
"""Name of the document."""


def base_document(base: RecordReader, model: str) -> dict[str, Any]:
    """What a checkpoint says of its base: where it lies, and what tells it from others.

    Args:
        base: It.
        model: Name of the model in it.
    """
    path = Path(base.directory).absolute() / str(base.step)
    return {"path": str(path), "model": model, "checksum": checksum(base, model)}


def checksum(reader: RecordReader, model: str) -> int:
    """CRC-32 over the seals of a model's parameters, with names, shapes and types."""
    found = 0
    for line in sorted(reader.seals(f"{model}/params/")):
        found = zlib.crc32(line.encode(), found)
    return found


def base_of(reader: RecordReader, path: str | Path | None = None) -> tuple[RecordReader, str]:
    """The checkpoint that another's frozen parameters are in, and the model's name there.

    Args:
        reader: A checkpoint with the document `base`.
        path: Where the base is now; None: where it was.

    Raises:
        CheckpointError: It is gone, or holds other parameters than those that were trained beside.
    """
    said = reader.document(BASE, dict)
    where = f"checkpoint '{reader.directory}' step {reader.step}"
    try:
        if said is None:
            raise ValueError("it says of no base")
        known, model, wanted = (
            member(said, name, kind)
            for name, kind in (("path", str), ("model", str), ("checksum", int))
        )
    except ValueError as problem:
        raise CheckpointError(f"{where}: {problem}; restore it from a copy") from problem
    try:
        base = find_checkpoint(known if path is None else path)
    except CheckpointError as problem:
        raise CheckpointError(
            f"{where} is an adapter of '{known if path is None else path}', which cannot be read:"
            f" {problem}; name the place of its base with --base"
        ) from problem
    check_base(base, model, wanted, where)
    return base, model


def check_base(base: RecordReader, model: str, wanted: int, where: str) -> None:
    """Refuse another base than the one that was trained beside.

    Raises:
        CheckpointError: Names both.
    """
    if checksum(base, model) != wanted:
        raise CheckpointError(
            f"{where} is an adapter of another base than '{base.directory}' step {base.step}, whose"
            " parameters differ; give the one that it was trained beside"
        )
