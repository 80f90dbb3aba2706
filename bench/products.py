"""Many cases against one device, one after another: a call goes on where the last one stopped.

Importing this sets up eight host devices and the highest precision of matmuls; JAX comes later.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
os.environ.setdefault("NPROC", "64")  # fewer threads, and collectives side by side may wait forever
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true",
)

import common  # noqa: E402 (after the settings above)

sys.path.insert(0, str(common.REPOSITORY))  # the cases are a part of the tests

_CLEARED_EVERY = 8
"""Cases after which compiled programs are forgotten: they would fill the memory."""


def parser(about: str, name: str) -> argparse.ArgumentParser:
    """What every product is asked.

    Args:
        about: Of the help.
        name: Of the file of results.
    """
    found = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    found.add_argument("--out", type=Path, default=common.HERE / "results" / f"{name}.json")
    found.add_argument("--only", help="of names that contain this")
    return found


def run(
    asked: argparse.Namespace, about: Mapping[str, Any], checks: Mapping[str, Callable[[], None]]
) -> int:
    """Run what has not run yet, write each verdict down, print a line; 1 where one is wrong.

    Args:
        asked: See `parser`.
        about: What results must have in common to be counted together.
        checks: By name; one that raises is wrong, a refusal too.
    """
    import jax

    result = _known(asked.out, about)
    wanted = {name: check for name, check in checks.items() if (asked.only or "") in name}
    left = [n for n in wanted if n not in result["passed"] and n not in result["failed"]]
    print(f"{len(wanted)} cases, {len(left)} to run", flush=True)
    for at, name in enumerate(left):
        start = time.process_time()
        wrong = _verdict(wanted[name])
        cpu_s = round(time.process_time() - start, 1)
        if wrong is None:
            result["passed"][name] = cpu_s
        else:
            result["failed"][name] = {"cpu_s": cpu_s, "why": wrong}
            print(f"{name}: {wrong}", flush=True)
        result["cpu_s"] = round(result["cpu_s"] + cpu_s, 1)
        common.write_json(asked.out, result)
        if at % _CLEARED_EVERY == _CLEARED_EVERY - 1:
            jax.clear_caches()
    passed, failed = len(result["passed"]), len(result["failed"])
    print(f"{passed} equal one device, {failed} do not; {result['cpu_s']:.0f} CPU-seconds")
    return int(bool(failed))


def _verdict(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception as problem:  # noqa: BLE001 (any is a finding)
        return f"{type(problem).__name__}: {problem}"[:600]
    return None


def _known(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What earlier calls found, or nothing."""
    about = {**about, "versions": common.versions(), "hardware": common.hardware()}
    known = json.loads(path.read_text()) if path.exists() else {}
    if known and any(known.get(name) != value for name, value in about.items()):
        raise SystemExit(f"{path} is of another call; move it away")
    return {"passed": {}, "failed": {}, "cpu_s": 0.0, **known, **about}
