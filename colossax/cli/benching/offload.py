"""`colossax bench offload`."""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
from jaxtyping import Array

from colossax.cli.output import standard_output
from colossax.errors import InputError
from colossax.offload import (
    Rates,
    Update,
    cpu_share,
    hiding_tokens,
    measure_rates,
    save_rates,
    update_seconds,
)
from colossax.optim import DimsOptimizer, adamw, sgd
from colossax.planner import check_pipelined

BILLION = 1e9

_DIMS = (None,)  # of the one vector that is updated


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """What the rates mean for one optimizer; seconds are of a billion parameters."""

    optimizer: str
    bytes_per_direction: float
    cpu_parameters_per_s: float
    device_parameters_per_s: float
    cpu_share: float
    update_s: float
    device_only_s: float
    hiding_tokens: float


def run(args: argparse.Namespace) -> int:
    """Measure, write the rates, print what they mean, and return the exit code, 0."""
    if args.only is not None:
        raise InputError(f"--only '{args.only[0]}': it chooses among kernels; leave it out")
    with standard_output(protected=False) as out:
        rates = measure_rates(updates())
        if rates.platform == "gpu":
            rates = dataclasses.replace(rates, pipelined=check_pipelined(jax.local_devices()[0]))
        path = save_rates(rates, args.out)
        rows = [_row(rates, update.bytes_per_direction) for update in rates.updates]
        text = _as_json(rates, rows, path) if args.json else "\n".join(_table(rates, rows, path))
        out.write(f"{text}\n")
    return 0


def updates() -> list[Update]:
    """What is measured: optimizers of `colossax.optim` by the bytes they move each way."""
    low = "bfloat16"
    both = {"moment_dtype": low, "second_moment_dtype": low}
    return [
        _update("adamw, state float32", 12.0, adamw(1e-3)),
        _update("adamw, state mixed", 10.0, adamw(1e-3, moment_dtype=low)),
        _update("adamw, state bfloat16", 8.0, adamw(1e-3, **both)),
        _update("sgd without momentum", 4.0, sgd(1e-3)),
    ]


def _update(name: str, bytes_per_direction: float, make: DimsOptimizer) -> Update:
    optimizer = make(_DIMS)

    def start(params: Array) -> Any:
        return params, optimizer.init(params)

    def step(kept: Any, grads: Array) -> Any:
        params, state = kept
        moves, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, moves), state

    return Update(name=name, bytes_per_direction=bytes_per_direction, start=start, step=step)


def _row(rates: Rates, bytes_per_direction: float) -> _Row:
    update, share = rates.update(bytes_per_direction), cpu_share(rates, bytes_per_direction)
    return _Row(
        optimizer=update.name,
        bytes_per_direction=bytes_per_direction,
        cpu_parameters_per_s=update.cpu_parameters_per_s,
        device_parameters_per_s=update.device_parameters_per_s,
        cpu_share=share,
        update_s=update_seconds(share, rates, bytes_per_direction, BILLION),
        device_only_s=update_seconds(0.0, rates, bytes_per_direction, BILLION),
        hiding_tokens=hiding_tokens(rates, bytes_per_direction),
    )


def _as_json(rates: Rates, rows: list[_Row], path: Path) -> str:
    facts = {
        "rates": dataclasses.asdict(rates),
        "updates": [dataclasses.asdict(row) for row in rows],
        "file": str(path),
    }
    return json.dumps(facts, sort_keys=True)


_ROW = "{:22} {:>9} {:>10} {:>10} {:>9} {:>9} {:>11} {:>8}"


def _table(rates: Rates, rows: list[_Row], path: Path) -> Iterator[str]:
    yield f"{rates.device_kind}, JAX {rates.jax}"
    yield (
        f"copies in GB/s: to device {rates.to_device_bytes_per_s / 1e9:.3g},"
        f" to host {rates.to_host_bytes_per_s / 1e9:.3g},"
        f" each way at once {rates.both_ways_bytes_per_s / 1e9:.3g};"
        f" matmul {rates.matmul_flops_per_s / 1e12:.3g} TFLOP/s"
    )
    if rates.platform == "cpu":
        yield "the device is the CPU: copies are within its memory, and it has no share to take"
    yield _ROW.format(
        "update", "bytes", "CPU", "device", "CPU share", "s per 1e9", "device only", "tokens"
    )
    for row in rows:
        yield _ROW.format(
            row.optimizer,
            f"{row.bytes_per_direction:g}",
            f"{row.cpu_parameters_per_s / BILLION:.3g} G/s",
            f"{row.device_parameters_per_s / BILLION:.3g} G/s",
            f"{row.cpu_share:.2f}",
            f"{row.update_s:.3g}",
            f"{row.device_only_s:.3g}",
            f"{row.hiding_tokens:.0f}",
        )
    yield (
        "bytes: each way per parameter; s per 1e9: parameters in host memory, with the CPU's share;"
        "\ntokens: per device and step, from which computing hides the traffic"
    )
    if rates.pipelined is not None:
        verdict = "may be used" if rates.pipelined.passed else "stay off"
        yield f"pipelined transfers {verdict}: with and without them {rates.pipelined.shown}"
    yield f"written to {path}"
