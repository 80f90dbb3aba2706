"""The truth about a few plans: compiled for their target, in processes of their own."""

import concurrent.futures
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colossax.aot import Target
from colossax.config import Plan
from colossax.errors import InputError, PlanError
from colossax.planner.counting.compiled import usable_bytes
from colossax.planner.counting.inspection import inspect_task
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
    """

    task: Task
    config: TrainConfig | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> "Subject":
        """A run of the library."""
        return cls(task=task_of(config), config=config)


def compiled(
    subject: Subject, plans: Sequence[Plan], target: Target, processes: int
) -> list[Compiled]:
    """What compiled programs say of plans.

    Args:
        subject: What is planned.
        plans: Settled.
        target: What for.
        processes: At most so many at once; 1, or a task of one's own: in this one.

    Cost: a compilation of each.
    """
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
        words += ["--network", target.network.name] if not target.mixed else []
        done = subprocess.run(
            [sys.executable, "-m", "colossax", *words], capture_output=True, text=True
        )
    if done.returncode == 0:
        return json.loads(done.stdout)
    said = done.stderr.strip().rpartition("colossax: ")[2] if done.returncode == 2 else ""
    last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
    return {"refused": said or f"compiling ended with {done.returncode}: {last}"}


def true_seconds(predicted: Seconds, found: Compiled) -> Seconds:
    """Seconds with collectives as they are in the compiled program.

    What has compute beside it there may be hidden, all else is waited for. Compute stays as it was
    predicted, for what is compiled without a device is not tuned.
    """
    collectives = found["collectives"]
    exposed = sum((one["exposed_s"] for one in collectives), 0.0)
    return dataclasses.replace(
        predicted,
        waited=exposed,
        beside=sum((one["seconds"] for one in collectives), 0.0) - exposed,
    )


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
