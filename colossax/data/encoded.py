"""Tokens and arrays beside them as an entry of the cache: made once, checked when they are read."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from colossax.config import cache_folder
from colossax.data.cache import built_once, sealed, unsealed
from colossax.data.tokens import CheckedTokens, block_checksums
from colossax.documents import read_small

TOKENS = "tokens.bin"
_CHECKSUMS, _META = "checksums.npy", "meta.json"


def kept_tokens(
    kind: str, fingerprint: str, dtype: np.dtype, write: Callable[[Path], None]
) -> tuple[CheckedTokens, dict[str, np.ndarray]]:
    """An entry's tokens, and its arrays by name.

    Args:
        kind: Folder of such entries in the cache.
        fingerprint: Of what the entry is made of and of how.
        dtype: Of the tokens.
        write: Writes `TOKENS` and any `NAME.npy` into an empty folder; called where there is no
            such entry, or it is damaged.

    Raises:
        DataError: What `write` raises, or the cache cannot be written.
    """

    def build(part: Path) -> None:
        part.mkdir()
        write(part)
        _seal(part, fingerprint)

    def folder(*, to_the_last_block: bool = False) -> Path:
        return built_once(
            cache_folder() / kind / fingerprint,
            build,
            intact=lambda entry: _is_intact(entry, fingerprint, every_block=to_the_last_block),
        )

    found = folder()
    arrays = {file.stem: np.load(file) for file in sorted(found.glob("*.npy"))}
    tokens = CheckedTokens(
        found / TOKENS,
        dtype,
        arrays.pop("checksums"),
        repair=lambda: folder(to_the_last_block=True),
    )
    return tokens, arrays


def _seal(folder: Path, fingerprint: str) -> None:
    """Write down size and checksum of every file; of the tokens, a checksum per block."""
    np.save(folder / _CHECKSUMS, block_checksums(folder / TOKENS))
    files = {file.name: _traits(file) for file in folder.iterdir()}
    (folder / _META).write_text(sealed(json.dumps(files), fingerprint))


def _traits(file: Path) -> list:
    """Size in bytes and checksum; of the tokens the size alone.

    Raises:
        OSError: It is missing, or no file: a pipe would be waited for.
    """
    if not file.is_file():
        raise FileNotFoundError(file)
    size = file.stat().st_size
    if file.name == TOKENS:
        return [size]
    with file.open("rb") as opened:
        return [size, hashlib.file_digest(opened, "blake2b").hexdigest()]


def _is_intact(folder: Path, fingerprint: str, *, every_block: bool) -> bool:
    try:
        files = json.loads(unsealed(read_small(folder / _META).decode(), fingerprint))
        if any(_traits(folder / name) != traits for name, traits in files.items()):
            return False
        return not every_block or np.array_equal(
            block_checksums(folder / TOKENS), np.load(folder / _CHECKSUMS)
        )
    except (OSError, ValueError):
        return False
