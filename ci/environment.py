"""Make or update a virtual environment that holds this project.

    python3 ci/environment.py .venv [--extra dev] [--first REQUIREMENT] [--no-gpu]

Needs nothing but a Python, and is written so that an old one still reads it and gets a plain
refusal. The CUDA build of JAX is chosen when `nvidia-smi` answers, by its driver. What was
installed is noted inside the environment, so a call with nothing to do takes no time. Constraints
come from pip's own variable, PIP_CONSTRAINT.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time

OLDEST = (3, 11)
NOTE = "colossax.json"
# Oldest driver that runs a CUDA build, newest build first.
DRIVERS = ((580, "cuda13"), (525, "cuda12"))
# Compiling every module of every package takes longer than compiling the few that get imported.
PIP = ("-m", "pip", "install", "--progress-bar=off", "--no-compile", "--no-input")


class Refusal(Exception):
    """One sentence for the person who called."""


def say(text):
    sys.stderr.write(f"colossax: {text}\n")
    sys.stderr.flush()


def dotted(version):
    return ".".join(map(str, version))


def check_python(version, program):
    """Refuse a Python that is too old or cannot make environments."""
    another = "name another, as in `make train PYTHON=python3.12`"
    if version[:2] < OLDEST:
        raise Refusal(
            f"{program} is Python {dotted(version[:3])}, but {dotted(OLDEST)} or later is needed; "
            f"{another}"
        )
    try:
        import ensurepip
        import venv
    except ImportError as error:
        raise Refusal(
            f"{program} lacks the module '{error.name}' that makes virtual environments; install "
            f"it (Debian and Ubuntu: the package python3-venv) or {another}"
        ) from None
    del ensurepip, venv


def driver_version():
    """Version of the NVIDIA driver as text; None when nvidia-smi is absent or fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def choose_build(driver):
    """The extra (or None) that a driver calls for, and one line that says so."""
    if driver is None:
        return None, "nvidia-smi does not answer: JAX for CPU"
    major = driver.split(".")[0]
    for oldest, extra in DRIVERS:
        if major.isdigit() and int(major) >= oldest:
            return extra, f"NVIDIA driver {driver}: JAX for CUDA {extra[4:]}"
    return None, f"NVIDIA driver {driver} is older than {DRIVERS[-1][0]}: JAX for CPU"


def fingerprint(paths):
    """Hash of the files that decide what pip installs."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(file.read() + b"\0")
    return digest.hexdigest()


def read_note(folder):
    """What an earlier call installed; empty when there was none or it did not finish."""
    try:
        with open(os.path.join(folder, NOTE), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def run_logged(command, log):
    """Run a command with its output in the log; show the log's end when it fails."""
    with open(log, "a", encoding="utf-8") as file:
        code = subprocess.call(command, stdout=file, stderr=subprocess.STDOUT)
    if code:
        with open(log, encoding="utf-8", errors="replace") as file:
            sys.stderr.writelines(file.readlines()[-15:])
        raise Refusal(
            f"`{' '.join(command)}` failed with exit status {code}; all it said is in {log}"
        )


def ensure(folder, extras, first, root, why):
    """Bring the environment to hold the project with these extras, saying so if that takes work."""
    constraints = os.environ.get("PIP_CONSTRAINT", "").split()
    decisive = fingerprint([os.path.join(root, "pyproject.toml"), *constraints])
    wanted = {"python": list(sys.version_info[:3]), "files": decisive, "first": first}
    note = read_note(folder)
    have = set(note.pop("extras", ()))
    fresh = note == wanted
    if fresh and have.issuperset(extras):
        return

    started, log = time.monotonic(), folder.rstrip("/") + ".log"
    open(log, "w").close()
    if not fresh:
        say(f"[1/3] Python {dotted(wanted['python'])}: making {folder}")
        # Only an environment that carries our note is ours to empty.
        run_logged([sys.executable, "-m", "venv", *(["--clear"] if note else []), folder], log)
        have = set()
    held = sorted(have.union(extras))
    say(f"[2/3] {why}; installing (a minute or two, progress in {log})")
    pip = [os.path.join(folder, "bin", "python"), *PIP]
    if first:
        run_logged([*pip, *first], log)
    run_logged([*pip, "-e", f"{root}[{','.join(held)}]" if held else root], log)
    with open(os.path.join(folder, NOTE), "w", encoding="utf-8") as file:
        json.dump(dict(wanted, extras=held), file)
    say(f"[3/3] ready after {time.monotonic() - started:.0f} s")


def main():
    parser = argparse.ArgumentParser(description="Make or update a virtual environment.")
    parser.add_argument("folder")
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--first", action="append", default=[], help="install this before the rest")
    parser.add_argument("--no-gpu", action="store_true", help="never the CUDA build of JAX")
    given = parser.parse_args()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        check_python(sys.version_info, sys.executable or "python3")
        build, why = choose_build(driver_version())
        if given.no_gpu:
            build, why = None, "JAX for CPU, as asked"
        extras = given.extra + ([build] if build else [])
        ensure(given.folder, extras, given.first, root, why)
    except Refusal as refusal:
        say(str(refusal))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
