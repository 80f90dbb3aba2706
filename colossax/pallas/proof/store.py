"""Verdicts on disk: a file for each variant, in a folder for each state of all that matters."""

import dataclasses
import functools
import hashlib
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib

from colossax.compat import ptxas_path
from colossax.config import cache_folder
from colossax.files import write_whole

from .verdict import Variant, Verdict

_LOG = logging.getLogger(__name__)
_PACKAGE = Path(__file__).resolve().parents[2]

SOURCES = (_PACKAGE / "pallas", _PACKAGE / "compat.py")
"""What kernels, and the cases they are tried on, are made from."""

_PTXAS_LIMIT_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a verdict holds for; where any of it changes, the kernel is proved anew.

    Attributes:
        source: Hash of the source of the kernels and their proof.
        jax: Version.
        jaxlib: Version.
        ptxas: Version of the assembler, or empty where none is found.
        device_kind: As JAX names it.
    """

    source: str
    jax: str
    jaxlib: str
    ptxas: str
    device_kind: str

    @property
    def digest(self) -> str:
        """Names them in a path or a key."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def circumstances(device_kind: str, sources: Sequence[Path] = SOURCES) -> Circumstances:
    """Of this machine, now."""
    return Circumstances(
        source=_hash_of(tuple(sources)),
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        ptxas=_ptxas_version(),
        device_kind=device_kind,
    )


def path_of(variant: Variant, where: Circumstances) -> Path:
    """The file of a variant's verdict."""
    name = re.sub(r"[^a-z0-9]+", "-", str(variant).lower()).strip("-")
    return cache_folder() / "kernels" / where.digest / f"{name}.json"


def load(variant: Variant, where: Circumstances) -> Verdict | None:
    """The verdict kept, None where there is none or the file is damaged, which is logged."""
    path = path_of(variant, where)
    try:
        record = json.loads(path.read_text("utf-8"))
        return Verdict.from_json(record["verdict"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as problem:
        _LOG.warning("%s cannot be used (%r): the kernel is proved anew", path, problem)
        return None


def save(variant: Variant, where: Circumstances, verdict: Verdict) -> None:
    """Keep a verdict, whole or not at all; a folder that cannot be written is logged once."""
    path = path_of(variant, where)
    facts = {
        "variant": str(variant),
        "circumstances": dataclasses.asdict(where),
        "verdict": verdict.to_json(),
    }
    try:
        write_whole(path, json.dumps(facts, indent=1) + "\n")
    except OSError as problem:
        _say_unwritable(path.parent, str(problem))


@functools.lru_cache(maxsize=8)
def _say_unwritable(folder: Path, problem: str) -> None:
    _LOG.warning(
        "%s cannot be written (%s): verdicts on kernels are kept for this run alone; make room or"
        " name another folder in COLOSSAX_CACHE",
        folder,
        problem,
    )


@functools.lru_cache(maxsize=8)
def _hash_of(sources: tuple[Path, ...]) -> str:
    """Of what is running: read once, so that an edit during a run does not count."""
    total = hashlib.sha256()
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            total.update(file.relative_to(source.parent).as_posix().encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


@functools.lru_cache(maxsize=1)
def _ptxas_version() -> str:
    ptxas = ptxas_path() or shutil.which("ptxas")
    if ptxas is None:
        return ""
    try:
        said = subprocess.run(
            [str(ptxas), "--version"], capture_output=True, text=True, timeout=_PTXAS_LIMIT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    version = re.search(r"\bV(\d[\d.]*)", said)
    return version.group(1) if version else ""
