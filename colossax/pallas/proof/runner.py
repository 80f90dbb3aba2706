"""Starting the process that tries kernels, and reading its end."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .trial import of_memory
from .verdict import Variant, Verdict

COMMAND = (sys.executable, "-P", "-m", "colossax.pallas.proof")

_ROOT = Path(__file__).resolve().parents[3]
_LOOK_S, _DIE_S = 0.05, 5.0
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""No fault of a program ends it so; the first is how a system ends one when memory is short."""


@dataclasses.dataclass
class _Heard:
    """What the child has told so far."""

    ended: dict[int, Verdict] = dataclasses.field(default_factory=dict)
    begun: int | None = None
    unusable: str | None = None


def try_variants(
    variants: Sequence[Variant],
    device_kind: str,
    *,
    limit_s: float,
    decisive: bool = True,
    command: Sequence[str] = COMMAND,
) -> dict[Variant, Verdict]:
    """Verdicts on variants, tried by one child in turn until one hangs or crashes.

    Args:
        variants: What to try.
        device_kind: What the child must find.
        limit_s: Longest for each; the first one's holds the start.
        decisive: Whether one that takes longer is a hang; else there may have been too little time.
        command: The child; the paths of a request and of results are added.

    Returns:
        Of those that were begun; undecided for the first where the child did not begin.
    """
    request = _request(variants, device_kind, limit_s)
    try:
        heard, in_time, code, said = _run(command, request, limit_s)
    except OSError as problem:
        return {variants[0]: Verdict.undecided(f"no child process starts ({problem})")}
    if in_time:
        last = _verdict_of_end(code, said)
    else:
        how = Verdict.declined if decisive else Verdict.undecided
        last = how(f"the child process did not end within {limit_s:.0f} s")
    return _verdicts(variants, heard, last)


def _run(
    command: Sequence[str], asked: dict[str, Any], limit_s: float
) -> tuple[_Heard, bool, int, str]:
    """What a child has told, whether it ended in time, its exit code, and what it wrote."""
    with tempfile.TemporaryDirectory(prefix="colossax-proof-") as folder:
        request, results, errors = (Path(folder, name) for name in ("request", "results", "errors"))
        request.write_text(json.dumps(asked), "utf-8")
        results.touch()
        with errors.open("wb") as stderr:
            child = subprocess.Popen(
                [*command, str(request), str(results)],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=_environment(),
                start_new_session=True,
            )
        try:
            heard, in_time = _listen(child, results, limit_s)
        finally:
            _end(child)
        return heard, in_time, child.returncode or 0, errors.read_text("utf-8", errors="replace")


def _request(variants: Sequence[Variant], device_kind: str, limit_s: float) -> dict[str, Any]:
    of = [{"operation": one.operation, "fields": dataclasses.asdict(one)} for one in variants]
    return {"device_kind": device_kind, "limit_s": limit_s * len(variants), "variants": of}


def _environment() -> dict[str, str]:
    """Of a child that shares one device with this process, which may hold most of its memory."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), env.get("PYTHONPATH"))))
    env["JAX_TRACEBACK_FILTERING"] = "off"  # else JAX's notice follows the exception
    env.pop("JAX_CUDA_VISIBLE_DEVICES", None)
    place = getattr(jax.local_devices()[0], "local_hardware_id", None)
    if isinstance(place, int) and place >= 0:
        seen = [x for x in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
        env["CUDA_VISIBLE_DEVICES"] = seen[place] if place < len(seen) else str(place)
    return env


def _listen(child: subprocess.Popen, results: Path, limit_s: float) -> tuple[_Heard, bool]:
    """What is told until the child ends, or tells nothing for too long."""
    heard, lines = _Heard(), 0
    deadline = time.monotonic() + limit_s
    while True:
        running = child.poll() is None
        told = [x for x in results.read_text("utf-8").splitlines(keepends=True) if x[-1] == "\n"]
        for line in told[lines:]:
            lines += 1
            if _note(heard, json.loads(line)):
                deadline = time.monotonic() + limit_s
        if not running:
            return heard, True
        if time.monotonic() > deadline:
            return heard, False
        time.sleep(_LOOK_S)


def _note(heard: _Heard, line: dict[str, Any]) -> bool:
    """Take in one line; whether it ends a variant."""
    heard.unusable = line.get("unusable", heard.unusable)
    if "begun" in line:
        heard.begun = line["begun"]
    if "ended" in line:
        heard.ended[line["ended"]] = Verdict.from_json(line["verdict"])
        heard.begun = None
    return "ended" in line


def _end(child: subprocess.Popen) -> None:
    """Kill the child and what it has started, where it still runs."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # A process that waits for a broken device may not even die: it is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_DIE_S)


def _verdict_of_end(code: int, said: str) -> Verdict:
    """What it means for the variant under way that the child ended by itself."""
    if of_memory(said):
        return Verdict.undecided(f"memory was short in the child process ({_last_line(said)})")
    if -code in _FROM_OUTSIDE:
        name = signal.Signals(-code).name
        return Verdict.undecided(f"the child process was ended by {name}, for lack of memory maybe")
    how = f"crashed with signal {-code}" if code < 0 else f"ended with exit code {code}"
    return Verdict.declined(f"the child process {how} ({_last_line(said)})")


def _verdicts(variants: Sequence[Variant], heard: _Heard, last: Verdict) -> dict[Variant, Verdict]:
    verdicts = {variants[number]: verdict for number, verdict in heard.ended.items()}
    if heard.begun is not None:
        verdicts[variants[heard.begun]] = last
    elif heard.unusable is not None:
        verdicts[variants[0]] = Verdict.undecided(heard.unusable)
    elif not verdicts:
        verdicts[variants[0]] = Verdict.undecided(f"the child process did not begin: {last.reason}")
    return verdicts


def _last_line(said: str) -> str:
    """The last one that is no frame of a traceback."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith(" ")]
    return lines[-1][:300] if lines else "it said nothing"
