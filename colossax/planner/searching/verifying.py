"""The truth about a few plans: compiled for their target, in processes of their own."""

import concurrent.futures
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colossax.aot import Target, kernels_anew
from colossax.config import Plan
from colossax.errors import InputError, PlanError
from colossax.planner.counting.compiled import usable_bytes
from colossax.planner.counting.inspection import inspect_task
from colossax.planner.searching.kept import entry_of, keep, kept
from colossax.planner.searching.seconds import Seconds
from colossax.tasks import Task, TrainConfig, task_of
from colossax.tasks.config import train_config_to_json

Compiled = Mapping[str, Any]
"""What `Inspection.to_json` says of a plan; `refused` with a sentence where it is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned.

    Attributes:
        task: As it is trained.
        config: The run, where it is one of the library's: those can be compiled in processes.
        fresh: Whether all is compiled anew, and nothing kept for the next search.
    """

    task: Task
    config: TrainConfig | None = None
    fresh: bool = False

    @classmethod
    def of(cls, config: TrainConfig, *, fresh: bool = False) -> "Subject":
        """A run of the library."""
        return cls(task=task_of(config), config=config, fresh=fresh)


def compiled(
    subject: Subject, plans: Sequence[Plan], target: Target, processes: int
) -> list[Compiled]:
    """What compiled programs say of plans.

    Of those that were compiled by an earlier search it is read, with `kept` true, unless the
    subject asks for fresh ones.

    Args:
        subject: What is planned.
        plans: Settled.
        target: What for.
        processes: At most so many at once; 1, or a task of one's own: in this one.

    Cost: a compilation of each that is not kept.
    """
    entries = [_entry(subject, plan, target) for plan in plans]
    found = [None if entry is None else kept(entry) for entry in entries]
    new = [plan for plan, one in zip(plans, found, strict=True) if one is None]
    with kernels_anew() if subject.fresh else contextlib.nullcontext():
        compiled_now = iter(_compiled(subject, new, target, processes))
    answers: list[Compiled] = []
    for entry, one in zip(entries, found, strict=True):
        if one is not None:
            answers.append({**one, "kept": True})
            continue
        answers.append(next(compiled_now))
        if entry is not None and "refused" not in answers[-1]:
            keep(entry, answers[-1])
    return answers


def _entry(subject: Subject, plan: Plan, target: Target) -> Path | None:
    """Where a plan's program is kept; None where it is not, as of a plan that will be refused."""
    if subject.fresh:
        return None
    try:
        return entry_of(subject.task, subject.config, plan, target)
    except PlanError:
        return None


def _compiled(
    subject: Subject, plans: Sequence[Plan], target: Target, processes: int
) -> list[Compiled]:
    if subject.config is None or processes < 2 or len(plans) < 2:
        return [_here(subject.task, plan, target) for plan in plans]
    configs = [subject.config.replace(plan=plan) for plan in plans]
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        return list(pool.map(lambda config: _apart(config, target), configs))


def _here(task: Task, plan: Plan, target: Target) -> Compiled:
    try:
        return inspect_task(task, plan, target).to_json()
    except PlanError as problem:
        return {"refused": str(problem)}


def _apart(config: TrainConfig, target: Target) -> Compiled:
    """In a process of its own, which is told the run in a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(train_config_to_json(config)), "utf-8")
        words = ["inspect", "--config", str(path), "--target", target.name, "--json"]
        words += ["--between", target.between.name]
        for network in {each.network.name for each in target.islands if not each.named}:
            words += ["--network", network]
        done = subprocess.run(
            [sys.executable, "-m", "colossax", *words], capture_output=True, text=True
        )
    if done.returncode == 0:
        return json.loads(done.stdout)
    said = done.stderr.strip().rpartition("colossax: ")[2] if done.returncode == 2 else ""
    last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
    return {"refused": said or f"compiling ended with {done.returncode}: {last}"}


def true_seconds(
    predicted: Seconds,
    found: Compiled,
    target: Target,
    slower: Callable[[Mapping[str, Any]], float] = lambda _: 1.0,
) -> Seconds:
    """Seconds with collectives, and transfers to and from the host, as they are in the compiled
    program.

    What has compute beside it there may be hidden, all else is waited for. Compute stays as it was
    predicted, for what is compiled without a device is not tuned.

    Args:
        predicted: By formula.
        found: What the program said.
        slower: By how much a collective takes longer than by data sheets, where it was measured.
    """
    collectives = [(one, slower(one)) for one in found["collectives"]]
    exposed = sum((times * one["exposed_s"] for one, times in collectives), 0.0)
    return dataclasses.replace(
        predicted,
        waited=exposed,
        beside=sum((times * one["seconds"] for one, times in collectives), 0.0) - exposed,
        bus=_bus(predicted.compute, found.get("host_traffic"), target),
    )


def _bus(compute: float, traffic: Mapping[str, Any] | None, target: Target) -> float:
    """Seconds that are waited for of the slower direction: what has no compute beside it in the
    program, and what lasts longer than all of that."""
    waited = 0.0
    for one in () if traffic is None else traffic["by_direction"]:
        rate = target.gpu.pcie_bytes_per_s
        waited = max(waited, one["exposed_bytes"] / rate, one["bytes"] / rate - compute)
    return waited


def room_of(target: Target, device_gb: float | None) -> float:
    """Bytes that a plan may take of a device.

    Raises:
        InputError: More is asked for than a device has.
    """
    usable = usable_bytes(target)
    if device_gb is None:
        return usable
    if device_gb * 1e9 > target.gpu.memory_bytes:
        raise InputError(
            f"--device-gb: found {device_gb:g}, and a {target.gpu.name} has"
            f" {target.gpu.memory_bytes / 1e9:.1f} GB; give less, or leave it out"
        )
    return device_gb * 1e9


Tell = Callable[[str], None]
"""Called with a line for people."""
