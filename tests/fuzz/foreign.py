"""Hostile folders of other libraries: weights, configurations, indices, tokenizers."""

import json
import random
import shutil
import struct
from pathlib import Path

import numpy as np

from colossax.checkpoint import RecordReader
from colossax.inference import open_checkpoint
from tests.fuzz.base import Base
from tests.fuzz.damage import damaged, dumped, mutated, replaced
from tests.fuzz.judge import Outcome, Verdict, called, commanded, held, judged, lost, wrong

Case = tuple[str, Verdict]
_JSON = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def of_import(base: Base, rng: random.Random, place: Path) -> Case:
    """Imported as something that can be opened, or refused with nothing left behind."""
    folder, out = place / "hf", place / "imported"
    shutil.copytree(base.hf, folder)
    outside = place / "outside.safetensors"
    outside.write_bytes((folder / "model.safetensors").read_bytes())
    what = rng.choice((_any_file, _a_value, _header, _header, _index))(folder, rng)
    kept = held(place)

    def good(done: Outcome) -> Verdict:
        if done.value != 0:
            return wrong(f"exit code {done.value}")
        return judged(called(lambda: _opened(out)), good=_is_finite)

    verdict = judged(commanded("import", str(folder), str(out)), names=_names(folder), good=good)
    if verdict.name == "refused" and out.exists():
        return what, wrong("refused, and the checkpoint's folder was made")
    if lost(kept, place):
        return what, wrong("files of the folder are gone or changed")
    return what, verdict


def _names(folder: Path) -> tuple[str, ...]:
    return (folder.name, *(path.name for path in folder.iterdir()), "lm_head.", "model.")


def _opened(out: Path) -> bool:
    """Whether all that was imported is finite."""
    open_checkpoint(out)
    reader = RecordReader(out)
    return all(bool(np.isfinite(reader.read(name)).all()) for name in reader.records())


def _is_finite(done: Outcome) -> Verdict:
    return Verdict(name="accepted") if done.value else Verdict(name="accepted", why="not finite")


def _any_file(folder: Path, rng: random.Random) -> str:
    files = sorted(folder.iterdir())
    chosen = rng.choice(files)
    said = damaged(chosen, rng, files) if rng.random() < 0.9 else _gone(chosen)
    if not folder.exists():
        folder.mkdir()
    return f"{chosen.name}: {said}"


def _gone(path: Path) -> str:
    path.unlink()
    return "deleted"


def _a_value(folder: Path, rng: random.Random) -> str:
    path = folder / rng.choice((*_JSON, "config.json", "config.json"))
    document, said = mutated(json.loads(path.read_bytes()), rng)
    replaced(path, dumped(document, rng))
    return f"{path.name}: {said}"


def _header(folder: Path, rng: random.Random) -> str:
    """Another value in the header of the weights."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    document, said = mutated(json.loads(content[8 : 8 + length]), rng)
    header = dumped(document, rng)
    told = len(header) if rng.random() < 0.9 else rng.choice((0, 2**63, 2**64 - 1, len(content)))
    replaced(path, struct.pack("<Q", told) + header + content[8 + length :])
    return f"header of {told}: {said}"


def _index(folder: Path, rng: random.Random) -> str:
    """An index in place of one file, with a value changed."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    names = [name for name in json.loads(content[8 : 8 + length]) if name != "__metadata__"]
    path.rename(folder / "model-00001-of-00001.safetensors")
    shard = rng.choice(("model-00001-of-00001.safetensors", "../outside.safetensors", 3))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
    document, said = mutated(index, rng) if rng.random() < 0.8 else (index, "as it should be")
    (folder / "model.safetensors.index.json").write_bytes(dumped(document, rng))
    return f"index to {shard}: {said}"
