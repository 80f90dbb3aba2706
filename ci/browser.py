"""Find a browser for the tests of the page, or install one.

    python3 ci/browser.py      its path, on stdout; one sentence and 2 where none can be had

COLOSSAX_BROWSER names one; else it is a Chromium that is on PATH, else Debian's, which needs root
and a package index. The driver is the extra `browser`, and brings no browser of its own.
"""

import os
import shutil
import subprocess
import sys

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGES = ("chromium-headless-shell", "fonts-dejavu-core")
LONGEST_S = 240


class Refusal(Exception):
    """One sentence for the person who called."""


def found():
    """The path of a browser that is there.

    Raises:
        Refusal: There is none.
    """
    named = os.environ.get("COLOSSAX_BROWSER")
    if named:
        if shutil.which(named) is None:
            raise Refusal(f"COLOSSAX_BROWSER: {named} is no program; name a Chromium")
        return shutil.which(named)
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    raise Refusal("there is no Chromium; `python3 ci/browser.py` installs one where that may be")


def installed():
    """The path of a browser, installed where there was none."""
    try:
        return found()
    except Refusal:
        if os.environ.get("COLOSSAX_BROWSER") or shutil.which("apt-get") is None:
            raise
    apt("update")
    apt("install", "--yes", "--no-install-recommends", *PACKAGES)
    return found()


def apt(*arguments):
    """Run it; its last line is the reason where it fails."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            ["apt-get", "--quiet", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"`apt-get {arguments[0]}` did not end within {LONGEST_S} s") from None
    if done.returncode:
        said = (done.stdout.strip().splitlines() or ["nothing said"])[-1]
        raise Refusal(f"no browser can be installed: `apt-get {arguments[0]}` said: {said}")


def main():
    """Print the path, or what stands in the way."""
    try:
        print(installed())
    except Refusal as refusal:
        print(f"NOT RUN: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
