"""`colossax inspect`."""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

import jax

from colossax.aot import Target, parse_target
from colossax.cli.options import preset_overrides
from colossax.cli.output import put, tell
from colossax.cli.overrides import Override, apply_overrides
from colossax.cli.recipes import run_as_asked
from colossax.cli.stage_lines import stage_lines
from colossax.config import Plan
from colossax.errors import InputError
from colossax.planner import (
    HIDING_FORMULA,
    HostTraffic,
    Inspection,
    LayoutCost,
    compare,
    compare_layouts,
    inspect_task,
    largest_microbatch,
    settle_task_for_target,
)
from colossax.recipes import OwnTask, any_recipe, recipe_from_file
from colossax.tasks import Task, TrainConfig, task_of

_PROOF_ASSUMED = (
    "kernels: proof assumed; on the GPUs 'auto' takes them once they have proved themselves there"
)

_GIB, _GB = 2**30, 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """One combination of target and preset.

    Attributes:
        label: For people.
        run: As it is on that target; of a recipe of one's own that gives a task, the task.
    """

    label: str
    target: Target
    run: TrainConfig | OwnTask

    @property
    def parts(self) -> tuple[Task, Plan]:
        """What is compiled."""
        if isinstance(self.run, TrainConfig):
            return task_of(self.run), self.run.plan
        assert self.run.config is not None
        return self.run.task, self.run.config.plan


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Inspect as asked and return the exit code."""
    # What is compiled for is not what is here: a GPU on this machine must not be claimed.
    jax.config.update("jax_platforms", "cpu")
    if args.compare_layouts is not None:
        return _compare_layouts(args, overrides)
    inspected = {
        asked.label: _inspected(asked, largest=args.largest_microbatch)
        for asked in _asked(args, overrides)
    }
    _write(args, inspected)
    if args.json:
        for one in inspected.values():
            put(json.dumps(one.to_json()) + "\n")
    elif len(inspected) == 1:
        put(describe(next(iter(inspected.values()))))
    else:
        put(describe_many(inspected))
    return 0


def _inspected(asked: _Asked, *, largest: bool) -> Inspection:
    task, plan = asked.parts
    _tell(f"compiling {asked.label}")
    settled = settle_task_for_target(task, plan, asked.target)
    if settled.fitted is not None:
        _tell(settled.fitted.line)
    if "pipeline.cuts" in settled.reasons:
        _tell(settled.reasons["pipeline.cuts"])
    one = inspect_task(task, settled.plan, asked.target)
    if not largest:
        return one
    largest_found = largest_microbatch(
        task, settled.plan, asked.target, lambda line: _tell(f"  {line}")
    )
    return one.with_largest(largest_found)


def _recipe(args: argparse.Namespace) -> TrainConfig | OwnTask:
    """The recipe that is named, or in a file.

    Raises:
        InputError: There is none.
    """
    if (args.recipe is None) == (args.config is None):
        raise InputError("inspect: name one recipe, or give --config FILE; see --list")
    return any_recipe(args.recipe) if args.config is None else recipe_from_file(args.config)


def _asked(args: argparse.Namespace, overrides: list[Override]) -> list[_Asked]:
    """Each combination of targets and presets.

    Raises:
        InputError: A name or value does not fit, or a task is given and no target.
    """
    given = _recipe(args)
    targets = args.target or (given.target if isinstance(given, TrainConfig) else None)
    if targets is None:
        raise InputError(
            f"inspect: {args.recipe} gives a task, which names no GPUs to compile for; add"
            " --target, such as --target h100:1x8"
        )
    return [
        _Asked(
            label=" ".join(filter(None, (target.name, dict(changes).get("plan.preset")))),
            target=target,
            run=_changed(given, changes),
        )
        for target, changes in itertools.product(
            [
                parse_target(one, network=args.network, between=args.between)
                for one in targets.split(",")
            ],
            preset_overrides(overrides),
        )
    ]


def _changed(given: TrainConfig | OwnTask, changes: list[Override]) -> TrainConfig | OwnTask:
    if isinstance(given, TrainConfig):
        return apply_overrides(given, changes)
    return run_as_asked(given, changes)


def describe(one: Inspection) -> str:
    """All facts of one inspection, for people."""
    memory = one.memory
    room = f"{one.limit_bytes / _GIB:.1f} GiB"
    verdict = "fits" if one.fits else "DOES NOT FIT"
    rows = [
        f"{one.name} on {one.target.name}: {_parameters(one.parameters)},"
        f" {one.microbatch} rows per device at a time, {one.microbatches} times a step"
        f"{f', attention by {one.attention}' if one.attention else ''}",
        *([f"note: {one.note}"] if one.note else []),
        *([_PROOF_ASSUMED] if one.proof_assumed else []),
        *([one.pipeline.line] if one.pipeline else []),
        *stage_lines(one.pipeline, _columns),
        *(one.experts.lines if one.experts else []),
        "",
        f"device memory: {memory.total_bytes / _GIB:.2f} GiB of {room}: {verdict}",
        *_columns(
            [(name, f"{size / _GIB:.3f} GiB") for name, size in _sorted(memory.terms) if size]
        ),
        f"host memory: {memory.host_bytes / _GIB:.2f} GiB",
        *(_host_traffic(one.host_traffic) if one.host_traffic else []),
        *_later(one),
        "largest temporaries:",
        *_columns(
            [
                (f"{b.bytes / _GIB:.3f} GiB", b.shape, b.term, _short(b.source))
                for b in memory.largest
            ]
        ),
        "",
        "collectives per device and step:",
        *_collectives(one),
        "",
        *_flops(one),
        f"at the roofline: {_seconds(one.compute_s)} of matmuls at the GPUs' peak;"
        f" {one.collective_s:.3f} s of collectives,"
        f" {one.exposed_s:.3f} s of them beside no compute",
    ]
    if one.searched:
        most = one.largest_microbatch
        rows.append(f"largest microbatch: {most} rows per device" if most else "not one row fits")
    rows.append(f"compiled in {one.program.compile_s:.1f} s")
    return "\n".join(rows) + "\n"


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} B parameters" if count >= 1e7 else f"{count:,} parameters"


def _flops(one: Inspection) -> list[str]:
    """What is known of them, and whose they are."""
    lines = []
    if one.flops_per_token is not None:
        lines = [
            f"model FLOPs per {one.counted.removesuffix('s')}: {one.flops_per_token / 1e9:.2f} G"
            " (recomputation not counted)"
        ]
    if one.traced is not None:
        lines = [
            "model FLOPs: not known, the task gives none (Task.flops, Task.tokens)",
            f"step FLOPs as traced: {one.traced.flops / 1e9:.2f} G of matmuls and convolutions on"
            " all devices, recomputation counted",
        ]
        if one.traced.left_out:
            lines.append(f"  not in it: {', '.join(one.traced.left_out)}")
    return lines


def describe_many(inspected: dict[str, Inspection]) -> str:
    """One line for each inspection, cheapest first; with a column for bubbles if any has stages."""
    staged = any(one.bubble is not None for one in inspected.values())
    times = ("compute s", *(["bubble"] if staged else []), "collectives s", "exposed s")
    head = ("", "GiB", "fits", "ring GB", *times)
    rows: list[tuple[str, ...]] = [head]
    for name in compare(inspected):
        one = inspected[name]
        ring = sum(link.totals.ring_bytes for link in one.links) / _GB
        rows.append(
            (
                name,
                f"{one.memory.total_bytes / _GIB:.2f}",
                "yes" if one.fits else "no",
                f"{ring:.2f}",
                "-" if one.compute_s is None else f"{one.compute_s:.3f}",
                *([_share(one.bubble)] if staged else []),
                f"{one.collective_s:.3f}",
                f"{one.exposed_s:.3f}",
            )
        )
    assumed = [_PROOF_ASSUMED] if any(one.proof_assumed for one in inspected.values()) else []
    return "\n".join(_columns(rows, indent="") + assumed) + "\n"


def _compare_layouts(args: argparse.Namespace, overrides: list[Override]) -> int:
    if args.compare_layouts < 0:
        raise InputError(
            f"--compare-layouts: found {args.compare_layouts}; give how many to compile, or nothing"
        )
    for asked in _asked(args, overrides):
        config, target = asked.run, asked.target
        if not isinstance(config, TrainConfig):
            raise InputError(
                f"--compare-layouts: {config.name} gives a task, and layouts are compared by the"
                " layers of the library's own models; leave it out, or compare plans, as in"
                " --plan.preset zero3,zero1"
            )
        layouts = compare_layouts(config, target, compiled=args.compare_layouts or None, tell=_tell)
        if args.json:
            for one in layouts:
                facts = {"recipe": config.recipe, "target": target.name, **one.to_json()}
                put(json.dumps(facts) + "\n")
        else:
            put(describe_layouts(config.recipe, target.name, layouts))
    return 0


def describe_layouts(name: str, target: str, layouts: list[LayoutCost]) -> str:
    """One line for each layout; bytes are of one layer, per device and step."""
    rows: list[tuple[str, ...]] = [
        ("layout", "sent MB, formula", "compiled", "ms", "memory MiB a layer", "GiB in all", "fits")
    ]
    for one in layouts:
        cells = [one.label, f"{one.predicted_bytes / 1e6:.1f}"]
        if one.compiled_bytes is None:
            cells += [one.refused or "not compiled", "", "", "", ""]
        else:
            assert one.seconds is not None and one.layer_bytes is not None
            assert one.device_bytes is not None
            cells += [
                f"{one.compiled_bytes / 1e6:.1f}",
                f"{one.seconds * 1e3:.2f}",
                f"{one.layer_bytes / 2**20:.1f}",
                f"{one.device_bytes / _GIB:.2f}",
                "yes" if one.fits else "no",
            ]
        rows.append(tuple(cells))
    head = f"{name} on {target}: one layer, per device and step"
    return "\n".join([head, *_columns(rows, indent="")]) + "\n"


def _collectives(one: Inspection) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("kind", "axis", "times", "GB", "ring GB", "link", "seconds", "beside compute")
    ]
    rows += [
        (
            link.totals.kind,
            link.totals.axis,
            str(link.totals.count),
            f"{link.totals.bytes / _GB:.3f}",
            f"{link.totals.ring_bytes / _GB:.3f}",
            link.link,
            f"{link.seconds:.4f}",
            "yes" if link.totals.overlapped else "no",
        )
        for link in one.links
    ]
    return _columns(rows) if one.links else ["  none"]


def _host_traffic(traffic: HostTraffic) -> list[str]:
    """Copies between GPU and host, and how many tokens hide them."""
    rows: list[tuple[str, ...]] = [
        ("direction", "times", "GB", "seconds", "beside a matmul", "synchronous in loops"),
        *(
            (
                one.direction.replace("_", " "),
                str(one.executions),
                f"{one.bytes / _GB:.3f}",
                _host_seconds(traffic, one.direction),
                str(one.beside_matmul),
                str(one.sync_in_loops),
            )
            for one in traffic.totals
        ),
    ]
    tokens = traffic.hiding_tokens
    hidden = "an unknown number of" if tokens is None else f"{tokens:,.0f}"
    return [
        "copies between device and host, per device and step, at the PCIe rate:",
        *_columns(rows),
        f"hidden by {hidden} tokens per step of all devices ({HIDING_FORMULA})",
    ]


def _later(one: Inspection) -> list[str]:
    """What is done once the step's program has ended."""
    rows = []
    if one.disk is not None:
        disk = one.disk
        rows += [
            f"disk: {disk.file_bytes / _GIB:.2f} GiB in one file for {disk.layers} layers,"
            f" {disk.read_bytes / _GB:.3f} GB read and {disk.written_bytes / _GB:.3f} GB written"
            f" per step, through {disk.memory_bytes / _GIB:.2f} GiB more of host memory"
        ]
    if one.cpu_layers:
        rows.append(f"the CPU updates {one.cpu_layers} layers")
    if rows:
        rows.append("these layers are updated after the program above: no computing hides that")
    return rows


def _host_seconds(traffic: HostTraffic, direction: str) -> str:
    seconds = {"to_device": traffic.up_s, "to_host": traffic.down_s}.get(direction)
    return "-" if seconds is None else f"{seconds:.4f}"


def _columns(rows: list[tuple[str, ...]], indent: str = "  ") -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    return [
        indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _sorted(terms) -> list[tuple[str, int]]:
    return sorted(terms.items(), key=lambda term: -term[1])


def _short(source: str) -> str:
    """The last two parts of a source position."""
    return "/".join(Path(source).parts[-2:])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _seconds(value: float | None) -> str:
    return "unknown time" if value is None else f"{value:.3f} s"


def _write(args: argparse.Namespace, inspected: dict[str, Inspection]) -> None:
    """The files asked for.

    Raises:
        InputError: They cannot be written.
    """
    try:
        if args.hlo:
            Path(args.hlo).write_text("\n".join(i.program.hlo for i in inspected.values()), "utf-8")
        if args.plot:
            from colossax.planner.counting.inspection_plot import plot_inspections

            plot_inspections(inspected, Path(args.plot))
    except OSError as problem:
        name = problem.filename or args.hlo or args.plot
        raise InputError(
            f"'{name}' cannot be written: {problem.strerror}; choose another"
        ) from None


def _tell(line: str) -> None:
    tell(f"{line}\n")
