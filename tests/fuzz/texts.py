"""Data sets that are damaged, strange or endless: read, or refused by name."""

import os
import random
from pathlib import Path

from colossax.data import encode_corpus, path_documents, train_tokenizer
from tests.fuzz.base import Base
from tests.fuzz.damage import BYTES, HOSTILE, PLACES, RAW, dumped
from tests.fuzz.judge import Outcome, Verdict, called, held, judged, lost, wrong

Case = tuple[str, Verdict]
_NAMES = (
    "a.txt",
    "b.jsonl",
    "c.parquet",
    "d.arrow",
    "e.py",
    "f",
    "dataset_dict.json",
    "state.json",
)


def of_data(base: Base, rng: random.Random, place: Path) -> Case:
    """A folder of some files, one or more of them strange."""
    base.copy_cache(place)
    folder = place / "data"
    folder.mkdir()
    (folder / "good.txt").write_text("the cat sat on the mat. " * 20)
    said = [_file(folder / rng.choice(_NAMES), rng) for _ in range(rng.choice((1, 1, 2)))]
    target = folder if rng.random() < 0.7 else rng.choice(sorted(folder.iterdir()))
    kept = held(folder)
    done = called(lambda: _read(target, skip=rng.random() < 0.3))
    names = (folder.name, *(path.name for path in folder.iterdir()), "tokenizer_vocab")
    verdict = judged(done, names=names, good=_sound)
    base.use_own_cache()
    if lost(kept, folder):
        verdict = wrong("files of the data set are gone or changed")
    return f"{target.name}: {', '.join(said)}", verdict


def _read(target: Path, *, skip: bool) -> tuple[int, int, int]:
    documents = path_documents(target, skip_undecodable=skip)
    corpus = encode_corpus(documents, train_tokenizer(documents, 300))
    corpus.split(0.1)
    tokens = corpus.tokens[0 : len(corpus.tokens)]
    return len(tokens), int(corpus.offsets[-1]), int(corpus.counts.sum())


def _sound(done: Outcome) -> Verdict:
    if len(set(done.value)) != 1:
        return wrong(f"counts differ: {done.value}")
    return Verdict(name="accepted")


def _file(path: Path, rng: random.Random) -> str:
    """Write one strange file."""
    if path.exists() or path.is_symlink():  # it may be a pipe, which would wait
        path = path.with_name(f"x{path.name}")
    kind = rng.randrange(5)
    if kind == 0:
        path.write_bytes(rng.randbytes(rng.choice((0, 1, 100, 10_000))))
        return f"{path.name} of random bytes"
    if kind == 1:
        path.write_bytes(b"".join(_line(rng) for _ in range(5)))
        return f"{path.name} of strange lines"
    if kind == 2:
        path.write_bytes(rng.choice(RAW))
        return f"{path.name} of raw text"
    if kind == 3:
        path.write_text("the dog ran. " * 50)
        return f"{path.name}, {rng.choice((*BYTES, *PLACES[2:]))(path, rng, [path])}"
    strange = path.with_name(os.fsdecode(rng.choice((b"\xff.txt", b"a\nb.jsonl", b"x" * 200))))
    strange.write_text('{"text": "the dog ran."}\n' * 5)
    return f"{strange.name!r:.30}"


def _line(rng: random.Random) -> bytes:
    value = rng.choice(HOSTILE)
    document = rng.choice(({"text": value}, value, {"text": "a dog"}, {"other": "x"}))
    if rng.random() < 0.2:
        return b'{"text": ' + rng.choice(RAW) + b"}\n"
    return dumped(document, rng) + rng.choice((b"\n", b"\r\n", b"\n\n", b""))
