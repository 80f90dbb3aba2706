"""Documents forged by one who knows how they are checked: their checksums match."""

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colossax.checkpoint import RecordReader
from tests.fuzz import base as truth
from tests.fuzz.base import STEPS, Base, checkpoints
from tests.fuzz.damage import dumped, mutated, replaced
from tests.fuzz.judge import Outcome, Verdict, called, commanded, held, judged, lost, wrong

Case = tuple[str, Verdict]


def of_manifest(base: Base, rng: random.Random, place: Path) -> Case:
    """A value of the manifest, its checksum renewed."""
    run = base.copy(place)
    path = _arrays(run) / "manifest.json"
    body, said = mutated(json.loads(json.loads(path.read_bytes())["body"]), rng)
    _write_manifest(path, dumped(body, rng).decode(errors="surrogateescape"))
    return f"manifest: {said}", _judged_call(rng, place, run)


def of_document(base: Base, rng: random.Random, place: Path) -> Case:
    """A value of a document, its checksum and that of the manifest renewed."""
    run = base.copy(place)
    path = _arrays(run) / "manifest.json"
    body = json.loads(json.loads(path.read_bytes())["body"])
    name = rng.choice(sorted(body["documents"]))
    file = checkpoints(run) / str(STEPS) / name / "metadata"
    document, said = mutated(json.loads(file.read_bytes()), rng)
    content = dumped(document, rng)
    replaced(file, content)
    body["documents"][name] = zlib.crc32(content)
    _write_manifest(path, json.dumps(body))
    return f"{name}: {said}", _judged_call(rng, place, run)


def of_metadata(base: Base, rng: random.Random, place: Path) -> Case:
    """A value of a record's `zarr.json`, its checksum and that of the manifest renewed."""
    run = base.copy(place)
    path = _arrays(run) / "manifest.json"
    body = json.loads(json.loads(path.read_bytes())["body"])
    name = rng.choice(sorted(body["metadata"]))
    document, said = mutated(json.loads((_arrays(run) / name).read_bytes()), rng)
    content = dumped(document, rng)
    replaced(_arrays(run) / name, content)
    body["metadata"][name] = zlib.crc32(content)
    _write_manifest(path, json.dumps(body))
    return f"{name}: {said}", _judged_call(rng, place, run)


def _judged_call(rng: random.Random, place: Path, run: Path) -> Verdict:
    """A call of any kind; what a forger made valid may be taken."""
    kept = held(checkpoints(run))
    calls: tuple[Callable[[], Outcome], ...] = (
        lambda: truth.said(run),
        lambda: commanded("export", str(run), str(place / "hf")),
        lambda: called(lambda: truth.digest(RecordReader(checkpoints(run)))),
        lambda: called(lambda: truth.digest(RecordReader(checkpoints(run)))),
        lambda: commanded(*truth.resuming(run)),
    )
    verdict = judged(rng.choice(calls)(), good=_taken)
    if lost(kept, run):
        return wrong("files of checkpoints are gone or changed")
    return verdict


def _taken(done: Outcome) -> Verdict:
    if done.value == 0 or isinstance(done.value, str):
        return Verdict(name="accepted")
    return wrong(f"exit code {done.value}: {done.said[-500:]}")


def _arrays(run: Path) -> Path:
    return checkpoints(run) / str(STEPS) / "arrays"


def _write_manifest(path: Path, body: Any) -> None:
    crc = zlib.crc32(body.encode(errors="replace"))
    replaced(path, json.dumps({"version": 2, "crc32": crc, "body": body}).encode())
