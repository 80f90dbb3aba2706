"""The process in which kernels are tried: one that hangs or crashes takes nobody along."""

import importlib
import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from .trial import of_memory, prove

_MODULES = {
    "attention": ("colossax.pallas.attention.proof", "AttentionVariant"),
    "grouped_matmul": ("colossax.pallas.grouped_matmul.proof", "GroupedVariant"),
    "int4_matmul": ("colossax.pallas.int4_matmul.proof", "Int4Variant"),
    "paged_attention": ("colossax.pallas.paged_attention.proof", "PagedVariant"),
    "sparse_matmul": ("colossax.pallas.sparse_matmul.proof", "SparseVariant"),
}
"""By operation: the module of its cases, which knows its kind of variant."""

Trials = Callable[[str, Mapping[str, Any]], Any]


def trials_of(operation: str, fields: Mapping[str, Any], **how: Any) -> Any:
    """The cases of a variant that came as JSON."""
    name, kind = _MODULES[operation]
    module = importlib.import_module(name)
    return module.trials(getattr(module, kind)(**fields), **how)


def serve(request: Path, results: Path, *, trials: Trials = trials_of, device: Any = None) -> None:
    """Try the variants of a request in turn; a line for each that begins and each that ends.

    Args:
        request: JSON: `device_kind`, `limit_s`, and `variants` with their operation and fields.
        results: Where the lines go, each as soon as it is known.
        trials: Cases of a variant.
        device: What to try them on, JAX's first unless given.
    """
    asked = json.loads(request.read_text("utf-8"))
    # A parent that is killed cannot end its child; a signal ends even one that waits for a device.
    signal.alarm(math.ceil(asked["limit_s"]) + 5)
    with results.open("a", encoding="utf-8") as out:

        def tell(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()
            os.fsync(out.fileno())

        unusable = _why_unusable(asked["device_kind"], device)
        if unusable is not None:
            return tell(unusable=unusable)
        for number, one in enumerate(asked["variants"]):
            tell(begun=number)
            verdict = prove(trials(one["operation"], one["fields"]))
            tell(ended=number, verdict=verdict.to_json())


def _why_unusable(device_kind: str, device: Any) -> str | None:
    """Why nothing can be tried here: the GPU may be another program's alone, or full."""
    try:
        actual = jax.devices()[0] if device is None else device
    except RuntimeError as problem:
        text = str(problem).partition("\n")[0]
        short = "device memory was short: " if of_memory(str(problem)) else ""
        return f"{short}a second process finds no device ({text})"
    if actual.device_kind != device_kind:
        return f"a second process finds '{actual.device_kind}' in place of '{device_kind}'"
    return None
