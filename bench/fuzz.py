"""Seeded damage and hostile input, case after case in one process; verdicts are counted.

    python bench/fuzz.py --cases 1000 --json bench/results/fuzz.json
    python bench/fuzz.py --case 1234                 one case again, told in full
    python bench/fuzz.py --kind "run, read" --cases 50

With `--json` it goes on with the number after the last one, adds to the counts, and keeps every
finding with its seed and number. A case that ended the process is found by the next call.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

from common import REPOSITORY, versions, write_json  # noqa: E402 (after the settings above)

sys.path.insert(0, str(REPOSITORY))  # the cases are a part of the tests

_DEADLOCK_S = 100
_CLEARED_EVERY = 100
"""Cases after which compiled programs are forgotten: they would fill the memory."""


def main() -> int:
    """Run cases as asked; 1 where one of them was wrong."""
    asked = _arguments()
    import jax

    from tests.fuzz import base, cases

    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/programs")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        known = _known(asked)
        start = base.make(Path(folder) / "base")
        first = known["next"] if asked.case is None else asked.case
        clock, done = time.monotonic(), 0
        while done < asked.cases and time.monotonic() - clock < asked.seconds:
            if done % _CLEARED_EVERY == _CLEARED_EVERY - 1:
                jax.clear_caches()
            number = first + done
            with _marked(asked, number):
                kind, what, verdict = cases.tried(start, asked.seed, number, asked.kind)
            _count(known, kind, verdict.name)
            if verdict.name == "wrong" or asked.case is not None:
                print(f"{number} {kind}: {what}\n  {verdict.name}: {verdict.why}", flush=True)
            if verdict.name == "wrong":
                finding = {"seed": asked.seed, "case": number, "kind": kind}
                why = _without_paths(verdict.why, folder)[-600:]
                finding |= {"what": _without_paths(what, folder), "why": why}
                known["findings"].append(finding)
            done += 1
            known["next"] = number + 1
            if asked.json and (verdict.name == "wrong" or done % 20 == 0):
                _write(asked, known)
        seconds = time.monotonic() - clock
        known["seconds"] = round(known["seconds"] + seconds, 1)
        _write(asked, known)
    _tell(known, done, seconds)
    return int(any(counts.get("wrong") for counts in known["counts"].values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--kind", help="of this kind alone")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.case is not None:
        asked.cases = 1
    return asked


def _known(asked: argparse.Namespace) -> dict:
    """What earlier calls found."""
    fresh = {"next": 0, "seconds": 0.0, "counts": {}, "findings": []}
    if asked.json is None or not asked.json.exists():
        return fresh
    known = json.loads(asked.json.read_text())
    if known["seed"] != asked.seed:
        raise SystemExit(f"{asked.json} is of seed {known['seed']}; give --seed {known['seed']}")
    if (left := _mark(asked)).exists():
        number = int(left.read_text())
        left.unlink()
        _count(known, "the process ended", "wrong")
        known["findings"].append({"seed": asked.seed, "case": number, "why": "the process ended"})
        known["next"] = number + 1
    return known


def _mark(asked: argparse.Namespace) -> Path:
    return asked.json.with_suffix(".now")


@contextlib.contextmanager
def _marked(asked: argparse.Namespace, number: int):
    """While a case runs, a file beside the JSON says which; a deadlock ends the process."""
    faulthandler.dump_traceback_later(_DEADLOCK_S, exit=True)
    if asked.json:
        _mark(asked).write_text(str(number))
    yield
    if asked.json:
        _mark(asked).unlink()
    faulthandler.cancel_dump_traceback_later()


def _without_paths(text: str, folder: str) -> str:
    """Without what is of this machine alone."""
    return text.replace(f"{REPOSITORY}/", "").replace(f"{folder}/", "")


def _count(known: dict, kind: str, verdict: str) -> None:
    counts = known["counts"].setdefault(kind, {})
    counts[verdict] = counts.get(verdict, 0) + 1


def _write(asked: argparse.Namespace, known: dict) -> None:
    if asked.json:
        write_json(asked.json, {**known, "seed": asked.seed, "versions": versions()})


def _tell(known: dict, done: int, seconds: float) -> None:
    for kind, counts in sorted(known["counts"].items()):
        print(f"{kind:18}", *(f"{name} {count}" for name, count in sorted(counts.items())))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    rate = 3600 * done / max(seconds, 1e-9)
    print(f"{done} cases in {seconds:.0f} s, {rate:.0f} an hour, at most {peak_mb} MB of memory")


if __name__ == "__main__":
    sys.exit(main())
