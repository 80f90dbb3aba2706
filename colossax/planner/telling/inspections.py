"""What inspections and layouts came to, as text for people."""

from pathlib import Path

from colossax.planner.counting.inspection import Inspection, compare
from colossax.planner.counting.traffic import HIDING_FORMULA, HostTraffic
from colossax.planner.deciding.candidates import LayoutCost
from colossax.planner.telling.columns import columns
from colossax.planner.telling.stages import stage_lines

_PROOF_ASSUMED = (
    "kernels: proof assumed; on the GPUs 'auto' takes them once they have proved themselves there"
)

_GIB, _GB = 2**30, 1e9


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
        *stage_lines(one.pipeline, columns),
        *(one.experts.lines if one.experts else []),
        "",
        f"device memory: {memory.total_bytes / _GIB:.2f} GiB of {room}: {verdict}",
        *columns(
            [(name, f"{size / _GIB:.3f} GiB") for name, size in _sorted(memory.terms) if size]
        ),
        f"host memory: {memory.host_bytes / _GIB:.2f} GiB",
        *(_host_traffic(one.host_traffic) if one.host_traffic else []),
        *_later(one),
        "largest temporaries:",
        *columns(
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
    return "\n".join(columns(rows, indent="") + assumed) + "\n"


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
    return "\n".join([head, *columns(rows, indent="")]) + "\n"


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
    return columns(rows) if one.links else ["  none"]


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
        *columns(rows),
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


def _sorted(terms) -> list[tuple[str, int]]:
    return sorted(terms.items(), key=lambda term: -term[1])


def _short(source: str) -> str:
    """The last two parts of a source position."""
    return "/".join(Path(source).parts[-2:])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _seconds(value: float | None) -> str:
    return "unknown time" if value is None else f"{value:.3f} s"
