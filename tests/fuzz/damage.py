"""Damage to files: what disks, people and half copies do to them; seeded."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    2**40,
    2**63,
    0.0,
    -1.0,
    1e-300,
    1e300,
    1.5,
    "",
    "x",
    "nan",
    "object",
    "float64",
    "../outside",
    "/etc/passwd",
    "a\u0000b",
    "é" * 3000,
    "~nouser/x",
    [],
    [0],
    [1, 2, 3],
    [[]],
    {},
    {"a": 1},
)
"""Values that stand where another was."""

RAW = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"9" * 10_000,
    b"[" * 200_000 + b"]" * 200_000,
    b'"\\ud800"',
    b"\xff",
    b"{",
    b"1" * 21,
)
"""Text that `json` cannot write, or should not."""


def replaced(path: Path, content: bytes) -> None:
    """Write beside and rename, so that other links to the old file keep what they have."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(content)
    os.replace(beside, path)


def one_bit(path: Path, rng: random.Random, _others: list[Path]) -> str:
    """One bit turned."""
    content = bytearray(path.read_bytes() or b"\0")
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    replaced(path, bytes(content))
    return f"bit {bit} of byte {at} turned"


def some_bytes(path: Path, rng: random.Random, _others: list[Path]) -> str:
    """A stretch of random bytes."""
    content = bytearray(path.read_bytes() or b"\0")
    at = rng.randrange(len(content))
    count = min(len(content) - at, rng.choice((1, 2, 8, 64, 4096)))
    content[at : at + count] = rng.randbytes(count)
    replaced(path, bytes(content))
    return f"{count} random bytes at {at}"


def zeros(path: Path, rng: random.Random, _others: list[Path]) -> str:
    """A stretch of zeros, as a file system leaves after a crash."""
    content = bytearray(path.read_bytes() or b"\0")
    at = rng.choice((0, rng.randrange(len(content))))
    count = min(len(content) - at, rng.choice((8, 512, 4096, 1 << 30)))
    content[at : at + count] = bytes(count)
    replaced(path, bytes(content))
    return f"{count} zeros at {at}"


def cut(path: Path, rng: random.Random, _others: list[Path]) -> str:
    """The end is missing."""
    content = path.read_bytes()
    length = rng.choice((0, len(content) // 2, max(0, len(content) - 1), rng.randrange(10**6)))
    replaced(path, content[:length])
    return f"cut to {length} of {len(content)} bytes"


def longer(path: Path, rng: random.Random, _others: list[Path]) -> str:
    """More follows."""
    content = path.read_bytes()
    more = rng.choice((b"\n", b"\0" * 4096, content, rng.randbytes(100)))
    replaced(path, content + more)
    return f"{len(more)} bytes more"


def gone(path: Path, _rng: random.Random, _others: list[Path]) -> str:
    """Deleted."""
    path.unlink()
    return "deleted"


def folder_gone(path: Path, _rng: random.Random, _others: list[Path]) -> str:
    """Its folder is deleted."""
    shutil.rmtree(path.parent)
    return "deleted with its folder"


def a_folder(path: Path, _rng: random.Random, _others: list[Path]) -> str:
    """A folder stands in its place."""
    path.unlink()
    path.mkdir()
    return "a folder in its place"


def a_pipe(path: Path, _rng: random.Random, _others: list[Path]) -> str:
    """A pipe that nobody writes to stands in its place."""
    path.unlink()
    os.mkfifo(path)
    return "a pipe in its place"


def a_link(path: Path, rng: random.Random, _others: list[Path]) -> str:
    """A link to itself, or to nothing."""
    path.unlink()
    target = rng.choice((path.name, "nowhere", "/dev/null"))
    path.symlink_to(target)
    return f"a link to {target}"


def another(path: Path, rng: random.Random, others: list[Path]) -> str:
    """What another file holds; of the same length where there is one, which is the worst."""
    size = path.stat().st_size
    alike = [one for one in others if one != path and one.stat().st_size == size]
    source = rng.choice(alike if alike and rng.random() < 0.8 else others)
    replaced(path, source.read_bytes())
    return f"holds what {source.name} of {source.parent.name} holds"


def exchanged(path: Path, rng: random.Random, others: list[Path]) -> str:
    """Exchanged with another file of its name, or any."""
    namesakes = [one for one in others if one.name == path.name and one != path]
    other = rng.choice(namesakes or others)
    mine, theirs = path.read_bytes(), other.read_bytes()
    replaced(path, theirs)
    replaced(other, mine)
    return f"exchanged with {other}"


def one_value(path: Path, rng: random.Random, others: list[Path]) -> str:
    """Another value in a JSON file; in others, one bit."""
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        return one_bit(path, rng, others)
    document, said = mutated(document, rng)
    replaced(path, dumped(document, rng))
    return said


BYTES = (one_bit, some_bytes, zeros, cut, longer)
PLACES = (gone, folder_gone, a_folder, a_pipe, a_link)
Damage = Callable[[Path, random.Random, list[Path]], str]


def damaged(path: Path, rng: random.Random, others: list[Path]) -> str:
    """One kind of damage to one file, said in few words."""
    kinds: tuple[Damage, ...] = (*BYTES, *BYTES, *PLACES, another, another, exchanged, one_value)
    return rng.choice(kinds)(path, rng, others)


def places_in(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values within a JSON document."""
    found = [at] if at else []
    if isinstance(document, dict | list):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in items:
            found += places_in(value, (*at, key))
    return found


_MARK = "\x01raw\x01"


def mutated(document: Any, rng: random.Random) -> tuple[Any, str]:
    """The document with one value changed, left out, moved, or one added."""
    places = places_in(document)
    if not places or rng.random() < 0.03:
        value = rng.choice(HOSTILE)
        return value, f"all of it is {value!r:.40}"
    *way, last = rng.choice(places)
    within = document
    for key in way:
        within = within[key]
    where = ".".join(map(str, (*way, last)))
    what = rng.random()
    if what < 0.15:
        del within[last]
        return document, f"without {where}"
    if what < 0.25 and isinstance(within, dict):
        within[f"{last}x" * rng.choice((1, 1, 2000))] = within.pop(last)
        return document, f"{where} is called otherwise"
    if what < 0.35:
        source = rng.choice(places)
        value = document
        for key in source:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                break
        within[last] = json.loads(json.dumps(value))
        return document, f"{where} is what {'.'.join(map(str, source))} is"
    if what < 0.5 and isinstance(within[last], int | float):
        within[last] = within[last] * rng.choice((-1, 0, 2, 3, 1e-9, 1e9, 7919))
        return document, f"{where} is {within[last]}"
    if what < 0.6:
        within[last] = _MARK
        return document, f"{where} is raw text"
    value = rng.choice(HOSTILE)
    within[last] = value
    return document, f"{where} is {value!r:.40}"


def dumped(document: Any, rng: random.Random) -> bytes:
    """The document as JSON, with raw text where `mutated` left room for some."""
    text = json.dumps(document).encode()
    return text.replace(json.dumps(_MARK).encode(), rng.choice(RAW))
