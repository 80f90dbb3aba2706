"""`colossax bench stages` and `colossax bench links`."""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax

import colossax
from colossax.cli.machine.devices import choose_devices, request_host_devices
from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.options.recipes import run_as_asked
from colossax.cli.output import standard_output
from colossax.config import Plan
from colossax.errors import InputError
from colossax.pallas.bench import Effort
from colossax.pipeline.measured import (
    DeviceTime,
    LayerTimes,
    LinkTimes,
    PairTime,
    save_layer_times,
    save_link_times,
)
from colossax.planner.deciding.calibrating import measure_rates
from colossax.planner.deciding.measuring import activation, measure_layer, measure_links
from colossax.planner.telling import rate_lines
from colossax.recipes import any_recipe
from colossax.tasks import Task, TrainConfig, task_of

EFFORT = Effort(seconds=0.1, repeats=5)
"""How long each device and each link is measured."""

_ON_A_CPU = {
    "stages": "the devices are parts of one CPU, which they share: no speeds of their own",
    "links": "the devices are parts of one CPU: copies within its memory, no links",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Device:
    """A device's layer; `spread` is of the repeats, highest less lowest over the median."""

    number: int
    device_kind: str
    seconds: float
    spread: float
    speed: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Link:
    """From a device to the next."""

    devices: tuple[int, int]
    device_kinds: tuple[str, str]
    seconds: float
    spread: float
    bytes_per_s: float


def run(args: argparse.Namespace, overrides: list[Override]) -> int:
    """Measure, write what was measured, print it, and return the exit code, 0."""
    if args.only is not None:
        raise InputError(f"--only '{args.only[0]}': it chooses among kernels; leave it out")
    name, task, plan = _asked(args.recipe, args.what, overrides)
    request_host_devices(args.devices)
    with standard_output(protected=False) as out:
        here = choose_devices(args.devices)
        devices = [device for device in here if device.process_index == jax.process_index()]
        measure = _stages if args.what == "stages" else _links
        facts, table = measure(name, task, plan, devices, args.out)
        if devices[0].platform == "cpu":
            table.insert(1, _ON_A_CPU[args.what])
        out.write((json.dumps(facts, sort_keys=True) if args.json else "\n".join(table)) + "\n")
    return 0


def _asked(given: str | None, what: str, overrides: list[Override]) -> tuple[str, Task, Plan]:
    """The recipe's name, its task and its plan.

    Raises:
        InputError: None is named, or a name or value does not fit.
    """
    if given is None:
        raise InputError(
            f"bench {what}: whose layer? name a recipe, as in colossax bench {what} llama3_8b"
        )
    found = any_recipe(given)
    if isinstance(found, TrainConfig):
        config = apply_overrides(found, overrides)
        return given, task_of(config), config.plan
    own = run_as_asked(found, overrides)
    assert own.config is not None
    return given, own.task, own.config.plan


def _stages(
    name: str, task: Task, plan: Plan, devices: Sequence[jax.Device], out: Path | None
) -> tuple[dict[str, Any], list[str]]:
    measured = measure_layer(task, plan, devices, EFFORT)
    medians = [median(seconds) for seconds in measured.seconds]
    rows = [
        _Device(
            number=number,
            device_kind=device.device_kind,
            seconds=medians[number],
            spread=_spread(measured.seconds[number]),
            speed=min(medians) / medians[number],
        )
        for number, device in enumerate(devices)
    ]
    kinds = dict.fromkeys(row.device_kind for row in rows)
    times = [
        LayerTimes(
            recipe=name,
            layer=measured.layer,
            flops=measured.flops,
            device_kind=kind,
            devices=tuple(
                DeviceTime(number=row.number, seconds=row.seconds)
                for row in rows
                if row.device_kind == kind
            ),
            **_circumstances(devices),
        )
        for kind in kinds
    ]
    _check_out(out, len(times))
    files = [str(save_layer_times(one, out)) for one in times]
    facts = {"devices": _plain(rows), "stages": _plain(times), "files": files}
    return facts, list(_stage_table(name, measured.layer, rows, files))


def _links(
    name: str, task: Task, plan: Plan, devices: Sequence[jax.Device], out: Path | None
) -> tuple[dict[str, Any], list[str]]:
    sent = activation(task, plan, devices[0])
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(sent))
    rows = [
        _Link(
            devices=pair,
            device_kinds=(devices[pair[0]].device_kind, devices[pair[1]].device_kind),
            seconds=median(seconds),
            spread=_spread(seconds),
            bytes_per_s=size / median(seconds),
        )
        for pair, seconds in measure_links(sent, devices, EFFORT).items()
    ]
    kinds = dict.fromkeys(_sorted(row) for row in rows)
    rates = measure_rates(sent, plan.precision.compute, devices, EFFORT)
    times = [
        LinkTimes(
            recipe=name,
            sent_bytes=float(size),
            device_kind=both[0],
            other_kind=both[1],
            pairs=tuple(
                PairTime(source=row.devices[0], target=row.devices[1], seconds=row.seconds)
                for row in rows
                if _sorted(row) == both
            ),
            **rates,
            **_circumstances(devices),
        )
        for both in kinds
    ]
    _check_out(out, len(times))
    files = [str(save_link_times(one, out)) for one in times]
    facts = {"pairs": _plain(rows), "links": _plain(times), "files": files}
    table = [*_link_table(name, size, rows), *rate_lines(**rates)]
    return facts, [*table, *(f"written to {file}" for file in files)]


def _sorted(row: _Link) -> tuple[str, str]:
    one, other = sorted(row.device_kinds)
    return one, other


def _circumstances(devices: Sequence[jax.Device]) -> dict[str, Any]:
    return {
        "platform": devices[0].platform,
        "jax": jax.__version__,
        "colossax": colossax.__version__,
    }


def _spread(seconds: Sequence[float]) -> float:
    return (max(seconds) - min(seconds)) / median(seconds)


def _plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def _check_out(out: Path | None, kinds: int) -> None:
    if out is not None and kinds > 1:
        raise InputError(
            f"--out {out}: there are {kinds} kinds of devices or links, each with its own file;"
            " leave it out, or choose devices with CUDA_VISIBLE_DEVICES"
        )


_STAGE = "{:>6}  {:30} {:>9} {:>4} {:>6}"
_LINK = "{:>10}  {:30} {:>9} {:>4} {:>9}"


def _stage_table(
    name: str, layer: str, rows: Sequence[_Device], files: Sequence[str]
) -> Iterator[str]:
    yield f"a layer of {name}, forward and backward, {layer}; JAX {jax.__version__}"
    yield _STAGE.format("device", "kind", "ms", "+-%", "speed")
    for row in rows:
        yield _STAGE.format(
            row.number,
            row.device_kind,
            f"{row.seconds * 1e3:.4g}",
            f"{row.spread * 100:.0f}",
            f"{row.speed:.2f}",
        )
    yield "speed: relative to the fastest"
    yield from (f"written to {file}" for file in files)


def _link_table(name: str, size: int, rows: Sequence[_Link]) -> Iterator[str]:
    yield (
        f"activations between layers of {name}, {size / 2**20:.3g} MiB, from each device to the"
        f" next; JAX {jax.__version__}"
    )
    yield _LINK.format("devices", "kinds", "us", "+-%", "GB/s")
    for row in rows:
        yield _LINK.format(
            f"{row.devices[0]} to {row.devices[1]}",
            " to ".join(dict.fromkeys(row.device_kinds)),
            f"{row.seconds * 1e6:.4g}",
            f"{row.spread * 100:.0f}",
            f"{row.bytes_per_s / 1e9:.3g}",
        )
