"""What a trace of JAX's profiler shows on GPUs: copies by direction, and kernels.

Reads the `.xplane.pb` that `jax.profiler.trace` writes, or the `.trace.json.gz` beside it where
this JAX cannot. Only lines of hardware streams count; other lines repeat them under other names.
"""

import collections
import dataclasses
import gzip
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_UNREADABLE = (ImportError, AttributeError, RuntimeError, OSError, ValueError, KeyError)
"""What readers raise on a damaged trace, or where JAX has no reader."""

TO_DEVICE, TO_HOST, ON_DEVICE, OTHER, KERNEL = "h2d", "d2h", "d2d", "other copy", "kernel"


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that a stream of a GPU did.

    Attributes:
        name: `MemcpyH2D` and the like, or a kernel's.
        seconds: How long.
        details: Of a copy, as CUPTI tells: `kind_src:pinned kind_dst:device size:1024 ...`.
    """

    name: str
    seconds: float
    details: str

    @property
    def kind(self) -> str | None:
        """One of the five; None for what is neither a copy nor a kernel, such as a memset."""
        if self.name.lower().startswith("memset"):
            return None
        if not self.name.lower().startswith("memcpy"):
            return KERNEL
        named = {"h2d": TO_DEVICE, "d2h": TO_HOST, "d2d": ON_DEVICE}.get(self.name[6:].lower())
        ends = re.search(r"kind_src:(\w+).*kind_dst:(\w+)", self.details)
        if named is not None or ends is None:
            return named or OTHER
        return {
            (False, True): TO_DEVICE,
            (True, False): TO_HOST,
            (True, True): ON_DEVICE,
        }.get((ends[1] == "device", ends[2] == "device"), OTHER)

    @property
    def bytes(self) -> int | None:
        """Of a copy, None where the trace does not say."""
        found = re.search(r"size:(\d+)", self.details)
        return int(found[1]) if found else None


LONGEST = 5
"""Kernels that a summary names."""


def summary(folder: Path, longest: int = LONGEST) -> dict[str, Any]:
    """Counts, bytes and seconds by kind of what a trace's folder holds.

    `failed` says why nothing could be read: no guess takes its place.
    """
    reasons = []
    for ending, read in ((".xplane.pb", _from_xplane), (".trace.json.gz", _from_json)):
        for path in sorted(folder.rglob(f"*{ending}")):
            try:
                events = list(read(path))
            except _UNREADABLE as problem:
                reasons.append(f"{path.name}: {type(problem).__name__}: {problem}")
                continue
            if events:
                return {"source": path.name, **totals(events, longest)}
            reasons.append(f"{path.name}: no GPU's stream in it")
    return {"failed": "; ".join(reasons) or "the profiler wrote no trace"}


def totals(events: Iterable[Event], longest: int = LONGEST) -> dict[str, Any]:
    """Per kind: how many, their seconds, and of copies the bytes; the longest kernels by name."""
    kinds: dict[str, dict[str, Any]] = {}
    kernels: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.kind is None:
            continue
        row = kinds.setdefault(event.kind, {"count": 0, "seconds": 0.0})
        row["count"] += 1
        row["seconds"] += event.seconds
        if event.kind == KERNEL:
            kernels[event.name] += event.seconds
        elif event.bytes is None:
            row["without_size"] = row.get("without_size", 0) + 1
        else:
            row["bytes"] = row.get("bytes", 0) + event.bytes
    named = [{"name": name[:80], "seconds": s} for name, s in kernels.most_common(longest)]
    return {"kinds": kinds, "longest_kernels": named}


def carried(found: dict[str, Any], *, to_device: int, to_host: int) -> bool | None:
    """Whether copy engines moved nearly all of these bytes; None where the trace cannot tell.

    Neither count may be short by more than 2 %, or else something besides them moved the rest.
    """
    if "failed" in found:
        return None
    kinds = found["kinds"]
    if any("without_size" in row for row in kinds.values()):
        return None
    moved = {kind: kinds.get(kind, {}).get("bytes", 0) for kind in (TO_DEVICE, TO_HOST)}
    return moved[TO_DEVICE] >= 0.98 * to_device and moved[TO_HOST] >= 0.98 * to_host


def _from_xplane(path: Path) -> Iterator[Event]:
    from jax.profiler import ProfileData

    for plane in ProfileData.from_file(str(path)).planes:
        if not _is_gpu(plane.name):
            continue
        for line in plane.lines:
            if not _is_stream(line.name):
                continue
            for event in line.events:
                details = [str(text) for name, text in event.stats if name == "memcpy_details"]
                yield Event(event.name, event.duration_ns * 1e-9, " ".join(details))


def _from_json(path: Path) -> Iterator[Event]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    gpus = {e["pid"] for e in named if e["name"] == "process_name" and _is_gpu(e["args"]["name"])}
    streams = {
        (e["pid"], e["tid"])
        for e in named
        if e["name"] == "thread_name" and _is_stream(e["args"]["name"])
    }
    for event in events:
        at = (event.get("pid"), event.get("tid"))
        if event.get("ph") == "X" and at in streams and at[0] in gpus:
            details = str(event.get("args", {}).get("memcpy_details", ""))
            yield Event(event["name"], event["dur"] * 1e-6, details)


def _is_gpu(name: str) -> bool:
    return "/device:GPU" in name


def _is_stream(name: str) -> bool:
    return name.startswith("Stream")
