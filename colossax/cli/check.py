"""`colossax check`."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator

import jax

from colossax.cli.machine.devices import choose_devices, request_host_devices
from colossax.cli.machine.facts import (
    Devices,
    Nvidia,
    ask_nvidia,
    describe,
    links,
    unused,
    versions,
)
from colossax.cli.machine.kernels import (
    Choice,
    Proof,
    kernel_choices,
    proofs,
    prove_kernels,
    why_nothing_to_prove,
)
from colossax.cli.options.overrides import Override
from colossax.cli.output import standard_output, tell
from colossax.errors import InputError
from colossax.pallas import current_target
from colossax.processes import find_launch, join, start_jax
from colossax.sharding.collectives import Trial, run_trials, within
from colossax.versions import Extra, extras, outdated

LIMIT_S = 25.0
"""Longest wait for one collective. XLA ends the process, without a name, after 30 s or more."""

PROOF_LIMIT_S = 900.0
"""Longest that kernels are tried; where that is too short, another check goes on."""

_FIND_LIMIT_S = 60.0
_MISSING_SHOWN = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All that `colossax check` says; `problems` are sentences with what to do."""

    usable: bool
    versions: dict[str, str]
    devices: Devices | None
    nvidia: Nvidia | None
    links: str
    kernels: dict[str, Choice]
    nothing_to_prove: str | None
    proofs: tuple[Proof, ...]
    extras: dict[str, Extra]
    limit_s: float
    collectives_measure: str
    collectives: tuple[Trial, ...]
    problems: tuple[str, ...]


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Look, report, and return the exit code."""
    if overrides:
        raise InputError(f"--{overrides[0][0]}: a check has no recipe and no plan; leave it out")
    request_host_devices(args.devices)
    # Room for all of JAX's usual share may not be there while another program runs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    launch = find_launch(
        args.coordinator, args.processes, args.process_id, timeout_s=args.timeout_s
    )
    with standard_output(protected=launch is not None) as out:
        join(launch, timeout_s=args.timeout_s)
        start_jax(launch)
        report, hung = look(args.devices)
        if report.devices is None or jax.process_index() == 0:
            text = json.dumps(dataclasses.asdict(report)) if args.json else "\n".join(lines(report))
            out.write(f"{text}\n")
    faults = [trial.sentence for trial in report.collectives if trial.fault]
    tell("".join(f"colossax: {fault}\n" for fault in faults))
    if hung:
        _leave(1)
    return 0 if report.usable else 1


def look(count: int | None) -> tuple[Report, bool]:
    """The report, and whether something is still running that may never end."""
    nvidia = ask_nvidia()
    jax_devices, failure, hung = _find_devices(count)
    devices = describe(jax_devices) if jax_devices else None
    trials = run_trials(jax_devices, limit_s=LIMIT_S) if jax_devices else ()
    target = current_target() if jax_devices else None
    verdicts = {}
    if target is not None and not any(trial.hung for trial in trials):
        alone = jax.process_count() == 1
        verdicts = prove_kernels(target, alone=alone, limit_s=PROOF_LIMIT_S)
    problems = [*outdated()]
    if failure is not None:
        problems.append(failure)
    elif nvidia and devices and devices.platform == "cpu":
        problems.append(unused(nvidia))
    report = Report(
        usable=devices is not None and not any(trial.fault for trial in trials),
        versions=versions(),
        devices=devices,
        nvidia=nvidia,
        links=links(devices, nvidia),
        kernels=kernel_choices(target, verdicts) if target else {},
        nothing_to_prove=why_nothing_to_prove(target) if target else "there are no devices",
        proofs=proofs(verdicts),
        extras=extras(),
        limit_s=LIMIT_S,
        collectives_measure=_measured(devices),
        collectives=trials,
        problems=tuple(problems),
    )
    return report, hung or any(trial.hung for trial in trials)


def _find_devices(count: int | None) -> tuple[list[jax.Device], str | None, bool]:
    """Devices; or a problem, and whether JAX still looks for them."""
    try:
        return within(_FIND_LIMIT_S, choose_devices, count), None, False
    except TimeoutError:
        failure = f"JAX has found no devices within {_FIND_LIMIT_S:g} s; see if nvidia-smi answers"
        return [], failure, True
    except (RuntimeError, AssertionError) as problem:  # of a backend that fails, or is not there
        return [], _no_devices(str(problem)), False


def _no_devices(why: str) -> str:
    first = why.splitlines()[0] if why else "its backend is missing or does not start"
    chosen = os.environ.get("JAX_PLATFORMS")
    if not chosen:
        return f"JAX finds no devices ({first}); install JAX for this machine anew"
    return (
        f"JAX finds no devices for JAX_PLATFORMS={chosen} ({first});"
        f" unset it, or install the extra it needs"
    )


def _leave(code: int) -> None:
    """End the process though a thread waits for devices, which an orderly exit would wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _measured(devices: Devices | None) -> str:
    if devices is None or devices.count == 1:
        return "none run, they need several devices"
    if devices.platform == "cpu":
        return "times are of copies in this CPU's memory, of no link"
    return "times include the start of a program"


def lines(report: Report) -> Iterator[str]:
    """The report for people."""
    for name, text in _rows(report):
        yield f"{name:19}{text}"
    yield f"{'collectives':19}{report.collectives_measure}"
    if report.collectives:
        right = sum(trial.fault is None for trial in report.collectives)
        count = f"{right} of {len(report.collectives)} gave the right values"
        yield f"{'':19}{count}; each may take {report.limit_s:g} s"
        yield _columns("mesh", "axis", "kind", "bytes", "median s", "ring bytes/s")
    for trial in report.collectives:
        yield _columns(trial.mesh, trial.axis, trial.kind, str(trial.bytes), *_figures(trial))
    for problem in report.problems:
        yield f"{'to do':19}{problem}"


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    yield from report.versions.items()
    yield from _device_rows(report.devices)
    yield "links", report.links
    for name, choice in report.kernels.items():
        yield name, choice.chosen
        for other, why in choice.declined.items():
            yield "", f"not {other}: {why}"
    if report.nothing_to_prove is not None:
        yield "proof of kernels", f"nothing to prove: {report.nothing_to_prove}"
    for proof in report.proofs:
        yield "proof of", f"{proof.kernel}: {proof.text}"
    yield "nvidia driver", report.nvidia.driver if report.nvidia else "nvidia-smi does not answer"
    if not report.extras:
        yield "extras", "not known, colossax is not installed as a package"
    for name, extra in report.extras.items():
        yield f"extra {name}", _extra_text(extra)


def _device_rows(devices: Devices | None) -> Iterator[tuple[str, str]]:
    if devices is None:
        yield "devices", "none"
        return
    told = devices.memory_bytes
    yield "platform", devices.platform
    yield "devices", f"{devices.count} x {devices.kind}"
    yield "memory per device", "not told" if told is None else f"{told / 2**30:.1f} GiB"
    yield "processes", str(devices.processes)


def _extra_text(extra: Extra) -> str:
    if extra.installed:
        return "installed"
    more = len(extra.missing) - _MISSING_SHOWN
    shown = ", ".join(extra.missing[:_MISSING_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"missing ({shown}): {extra.install}"


def _figures(trial: Trial) -> tuple[str, str]:
    if trial.seconds is None or trial.ring_bytes_per_s is None:
        return "failed", "-"
    return f"{trial.seconds:.6f}", f"{trial.ring_bytes_per_s:.2e}"


def _columns(*cells: str) -> str:
    mesh, axis, kind, size, seconds, rate = cells
    return f"  {mesh:18}{axis:6}{kind:15}{size:>9}{seconds:>11}{rate:>14}"
