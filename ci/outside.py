"""Fetch what tests use of other projects' source packages: the Gemma among Flax's examples.

    python ci/outside.py      the folder, on stdout; one sentence and 2 where it cannot be had

The package is that of the version of Flax that is installed. What was fetched is kept outside of
the tree, so a machine needs its package index once.
"""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from colossax.config import cache_folder

PACKAGE, PART = "flax", "examples/gemma"
LONGEST_S = 180


class Refusal(Exception):
    """One sentence for the person who called."""


def folder():
    """Where that part of the package lies, fetched where it does not yet."""
    version = importlib.metadata.version(PACKAGE)
    kept = cache_folder() / "outside" / f"{PACKAGE}-{version}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as place:
            whole = unpacked(downloaded(version, Path(place)), Path(place, "unpacked"))
            try:
                os.rename(whole, kept)
            except OSError:  # another process was faster
                if not kept.exists():
                    raise
    return kept / PART


def downloaded(version, place):
    """The archive of the package's sources."""
    wanted = f"{PACKAGE}=={version}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
    try:
        done = subprocess.run(
            [*pip, "--no-input", "--progress-bar=off", "--dest", place, wanted],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"the sources of {wanted} did not come within {LONGEST_S} s") from None
    found = sorted(place.glob(f"{PACKAGE}-*.tar.gz"))
    if done.returncode or not found:
        said = (done.stdout.strip().splitlines() or ["nothing said"])[-1]
        raise Refusal(f"the sources of {wanted} cannot be had from the package index: {said}")
    return found[0]


def unpacked(archive, place):
    """That part of an archive alone, in the folder of the package's root."""
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if f"/{PART}/" in m.name and m.isfile()]
        if not members:
            raise Refusal(f"{archive.name} has no {PART}; say where it went in ci/outside.py")
        tar.extractall(place, members, filter="data")
    return place / members[0].name.split("/")[0]


def main():
    """Print the folder, or what stands in the way."""
    try:
        print(folder())
    except Refusal as refusal:
        print(f"NOT RUN: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
