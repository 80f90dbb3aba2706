"""Checkpoints that hold what learned alone: the rest is of another one, their base."""

import os
import zlib
from pathlib import Path
from typing import Any

from colossax.checkpoint.records import RecordReader, find_checkpoint
from colossax.documents import member
from colossax.errors import CheckpointError

BASE = "base"
"""Name of the document."""


def base_document(base: RecordReader, model: str, folder: Path | str) -> dict[str, Any]:
    """What a checkpoint says of its base: where it lies, and what tells it from others.

    Args:
        base: It.
        model: Name of the model in it.
        folder: Of the checkpoint that says so: both may move together.

    Raises:
        CheckpointError: The base is of a version that has no seals, so nothing tells it apart.
    """
    path = Path(base.directory).absolute() / str(base.step)
    return {
        "path": str(path),
        "relative": os.path.relpath(path, Path(folder).absolute()),
        "model": model,
        "checksum": checksum(base, model),
    }


def checksum(reader: RecordReader, model: str) -> int:
    """CRC-32 over the seals of a model's parameters, with names, shapes and types.

    Raises:
        CheckpointError: There are no seals.
    """
    lines, found = reader.seals(f"{model}/params/"), 0
    if lines is None:
        raise CheckpointError(
            f"checkpoint '{reader.directory}' step {reader.step} has no checksums of what belongs"
            " in it, which an adapter knows its base by; write it anew with colossax export"
            " --as-checkpoint"
        )
    for line in sorted(lines):
        found = zlib.crc32(line.encode(), found)
    return found


def base_of(reader: RecordReader, path: str | Path | None = None) -> tuple[RecordReader, str]:
    """The checkpoint that another's frozen parameters are in, and the model's name there.

    Args:
        reader: A checkpoint with the document `base`.
        path: Where the base is now; None: where it was, or as far from the checkpoint as it was.

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
    places = [known if path is None else path]
    if path is None and isinstance(relative := said.get("relative"), str):
        places.append(os.path.normpath(Path(reader.directory).absolute() / relative))
    problems: list[CheckpointError] = []
    for place in places:
        try:
            base = find_checkpoint(place)
            check_base(base, model, wanted, where)
        except CheckpointError as problem:
            problems.append(problem)
        else:
            return base, model
    if any(isinstance(problem, AnotherBaseError) for problem in problems):
        raise next(one for one in problems if isinstance(one, AnotherBaseError))
    raise CheckpointError(
        f"{where} is an adapter of '{places[0]}', which cannot be read: {problems[0]}; name the"
        " place of its base with --base, or with --init where a run goes on"
    ) from problems[0]


class AnotherBaseError(CheckpointError):
    """A checkpoint is no base of an adapter."""


def check_base(base: RecordReader, model: str, wanted: int, where: str) -> None:
    """Refuse another base than the one that was trained beside.

    Raises:
        CheckpointError: Names both.
    """
    if checksum(base, model) != wanted:
        raise AnotherBaseError(
            f"{where} is an adapter of another base than '{base.directory}' step {base.step}, whose"
            " parameters differ; name the place of the one that it was trained beside with --base,"
            " or with --init where a run goes on"
        )
