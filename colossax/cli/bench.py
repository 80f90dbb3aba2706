"""`colossax bench`."""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from colossax.cli.benching import offload, stages
from colossax.cli.machine.facts import versions
from colossax.cli.options.overrides import Override
from colossax.cli.options.written import file_to_write
from colossax.cli.output import standard_output, tell
from colossax.errors import InputError
from colossax.files import write_whole
from colossax.pallas import current_target
from colossax.pallas.attention import bench as attention
from colossax.pallas.bench import Case, Effort, Limits, Row, measure, measure_limits
from colossax.pallas.grouped_matmul import bench as grouped_matmul
from colossax.pallas.int4_matmul import bench as int4_matmul
from colossax.pallas.paged_attention import bench as paged_attention
from colossax.pallas.sparse_matmul import bench as sparse_matmul

LIMIT_S = 180.0
"""Longest wait for one case, compilation included."""

_MEASURED = (
    attention.cases,
    grouped_matmul.cases,
    paged_attention.cases,
    int4_matmul.cases,
    sparse_matmul.cases,
)
"""What is measured: cases for a target, a scale and a dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setting:
    """What a kind of device is measured with."""

    scale: int
    dtype: Any
    matmul: int
    copy_bytes: int
    effort: Effort


_GPU = _Setting(scale=1, dtype=jnp.bfloat16, matmul=8192, copy_bytes=2**30, effort=Effort())
_CPU = _Setting(
    scale=32,
    dtype=jnp.float32,
    matmul=1024,
    copy_bytes=2**27,
    effort=Effort(seconds=0.05, repeats=3),
)


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Measure, print a table, and return the exit code: 1 when a kernel is wrong or fails."""
    of_a_recipe = args.what in ("stages", "links")
    if not of_a_recipe:
        _refuse_recipe(args, overrides)
    args.out = file_to_write(args.out, "--out")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if of_a_recipe:
        return stages.run(args, overrides)
    if args.what == "offload":
        return offload.run(args)
    with standard_output(protected=False) as out:
        setting = _CPU if current_target().platform == "cpu" else _GPU
        cases = list(_cases(setting))
        for text in args.only or ():
            if not any(text in _name(case) for case in cases):
                raise InputError(f"--only '{text}': no case of that name; leave it out to see all")
        cases = [c for c in cases if any(text in _name(c) for text in args.only or ("",))]
        limits = measure_limits(
            setting.effort,
            dtype=setting.dtype,
            size=setting.matmul,
            copy_bytes=setting.copy_bytes,
        )
        rows = []
        if not args.json:
            out.write("\n".join(_head(limits, setting)) + "\n")
        for case in cases:
            with _watched(case):
                measured = list(measure(case, limits, setting.effort))
            rows += measured
            for row in measured:
                out.write((json.dumps(dataclasses.asdict(row)) if args.json else _line(row)) + "\n")
            out.flush()
            if args.out is not None:
                _write(args.out, limits, rows)
    wrong = [row for row in rows if row.failed or row.right is False]
    for row in wrong:
        tell(f"colossax: {_complaint(row)}\n")
    return 1 if wrong else 0


def _refuse_recipe(args: argparse.Namespace, overrides: list[Override]) -> None:
    """What is measured without a recipe takes none, nor what belongs to one."""
    if overrides:
        raise InputError(
            f"--{overrides[0][0]}: bench {args.what} has no recipe and no plan; leave it out"
        )
    if args.recipe is not None:
        raise InputError(f"'{args.recipe}' is one word too many; see colossax bench --help")
    if args.devices is not None:
        raise InputError(
            f"--devices: it is for bench stages and links, not {args.what}; leave it out"
        )


@contextlib.contextmanager
def _watched(case: Case) -> Iterator[None]:
    """End the process where a case takes too long: a kernel that hangs cannot be stopped else."""

    def leave() -> None:
        tell(
            f"colossax: {_name(case)}: no result within {LIMIT_S:g} s, one of"
            f" {list(case.functions)} hangs; the cases before are measured, --only takes others\n"
        )
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(LIMIT_S, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _cases(setting: _Setting) -> Iterator[Case]:
    for cases in _MEASURED:
        yield from cases(current_target(), scale=setting.scale, dtype=setting.dtype)


def _name(case: Case) -> str:
    return f"{case.kernel} {case.shape}"


def _head(limits: Limits, setting: _Setting) -> Iterator[str]:
    device, dtype = jax.devices()[0], jnp.dtype(setting.dtype).name
    yield f"{device.device_kind}, JAX {jax.__version__}, {dtype}"
    yield (
        f"limits of this run: matmul {limits.matmul_flops / 1e12:.3g} TFLOP/s,"
        f" copy {limits.copy_bytes / 1e9:.3g} GB/s"
    )
    yield _ROW.format("kernel", "shape", "by", "us", "+-%", "TFLOP/s", "limit", "anchor", "error")


_ROW = "{:19} {:46} {:9} {:>9} {:>4} {:>8} {:>6} {:>6} {:>8}"


def _line(row: Row) -> str:
    if row.failed or row.us is None:
        return _ROW.format(row.kernel, row.shape, row.implementation, "failed", *[""] * 5)
    return _ROW.format(
        row.kernel,
        row.shape,
        row.implementation,
        f"{row.us:.4g}",
        f"{100 * (row.spread or 0):.0f}",
        f"{row.tflops:.3g}",
        f"{row.of_limit:.2f}",
        "" if row.of_anchor is None else f"{row.of_anchor:.2f}",
        f"{row.error:.1e}",
    )


def _complaint(row: Row) -> str:
    named = f"{row.kernel}, {row.shape}, {row.implementation}"
    if row.failed:
        return f"{named}: {row.failed}"
    return f"{named}: {row.error:.1e} from float64, more than 1.5 times its anchor; do not use it"


def _write(path: Path, limits: Limits, rows: list[Row]) -> None:
    device = jax.devices()[0]
    report = {
        "benchmark": "kernels",
        "device": device.device_kind,
        "versions": versions(),
        "limits": dataclasses.asdict(limits),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    write_whole(path, json.dumps(report, indent=1, sort_keys=True) + "\n")
