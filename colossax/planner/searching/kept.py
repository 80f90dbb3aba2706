"""What compiled programs said of plans, kept in the cache folder for the next search."""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from colossax.aot import Target
from colossax.compat import cudnn_installed
from colossax.config import Plan, cache_folder, to_json
from colossax.documents import parse_json, read_small
from colossax.errors import PlanError
from colossax.files import write_whole
from colossax.planner.counting.compiled import lowered_task, settle_task_for_target
from colossax.sharding import compiler_options
from colossax.tasks import Task, TrainConfig
from colossax.tasks.config import train_config_to_json
from colossax.versions import version_of

FORMAT = 1
"""Of what is kept."""

_PACKAGE = Path(__file__).resolve().parents[2]

_COMPILERS = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
"""Packages whose versions a program depends on, where they are installed."""

_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl")


def entry_of(task: Task, config: TrainConfig | None, plan: Plan, target: Target) -> Path:
    """The file that holds what a plan's program said, whether it is there or not.

    Its name is a hash of all that decides the program. Of a run of the library that is its
    configuration, with the library's source and the versions of what compiles it; with code of
    one's own it is the program itself, as it is before it is compiled.

    Args:
        task: What is trained.
        config: The run, where it is one of the library's.
        plan: Its own.
        target: What for.

    Raises:
        PlanError: With code of one's own: model, batch or devices do not fit the plan, or its
            stages have programs of their own.

    Cost: of a run of the library none, but for the first call, which reads the library's source;
    else the step is traced.
    """
    networks = [island.network.name for island in target.islands]
    ours = config is not None and type(config.model).__module__.startswith("colossax.")
    facts = {
        "run": train_config_to_json(config.replace(plan=plan)) if ours else None,
        "program": None if ours else _program(task, plan, target),
        "batch": {name: [list(x.shape), str(x.dtype)] for name, x in task.shapes.items()},
        "plan": to_json(plan),
        "target": [target.name, *networks, target.between.name],
        "source": _source(),
        "versions": [FORMAT, *map(version_of, _COMPILERS)],
        "cudnn": cudnn_installed(),
        "settings": [str(jax.config.values[name]) for name in _SETTINGS],
        "environment": {name: os.environ[name] for name in sorted(os.environ) if _decides(name)},
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "plans" / f"{digest}.json"


def kept(entry: Path) -> Mapping[str, Any] | None:
    """What is in the file; None where nothing is, or what is no such thing, to be written anew."""
    try:
        record = parse_json(read_small(entry), dict)
    except (OSError, ValueError):
        return None
    found = record.get("found")
    return found if record.get("format") == FORMAT and _is_whole(found) else None


def _is_whole(found: Any) -> bool:
    """Whether it has what a search reads."""
    sizes = found.get("device_bytes") if isinstance(found, dict) else None
    if not isinstance(sizes, dict) or not isinstance(found.get("collectives"), list):
        return False
    terms, collectives = sizes.get("terms"), found["collectives"]
    if not isinstance(terms, dict) or not all(isinstance(one, dict) for one in collectives):
        return False
    traffic = found.get("host_traffic", {"by_direction": []})
    moved = traffic.get("by_direction") if isinstance(traffic, dict) else None
    if not isinstance(moved, list) or not all(isinstance(one, dict) for one in moved):
        return False
    numbers = [sizes.get("total"), found.get("host_bytes"), *terms.values()]
    numbers += [one.get(name) for one in moved for name in ("bytes", "exposed_bytes")]
    numbers += [one.get(name) for one in collectives for name in ("seconds", "exposed_s")]
    return all(isinstance(number, int | float) for number in numbers)


def keep(entry: Path, found: Mapping[str, Any]) -> None:
    """Write it whole or not at all; without room for it the next search compiles again."""
    with contextlib.suppress(OSError):
        write_whole(entry, json.dumps({"format": FORMAT, "found": found}))


def _program(task: Task, plan: Plan, target: Target) -> list[Any]:
    """A step of one's own, as the compiler gets it."""
    settled = settle_task_for_target(task, plan, target)
    if settled.plan.pipeline.cuts is not None:
        raise PlanError("plan.pipeline.cuts: stages with programs of their own have no one program")
    step, _, lowered = lowered_task(task, settled, target)
    return [lowered.as_text(), dict(compiler_options(step.bound))]


@functools.cache
def _source() -> str:
    """Hash of the library's source: read once, so that an edit while it runs does not count."""
    total = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*")):
        if file.suffix in (".py", ".json"):
            total.update(file.relative_to(_PACKAGE).as_posix().encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def _decides(name: str) -> bool:
    """Whether a variable of the environment may change what is compiled."""
    return name == "XLA_FLAGS" or name.startswith("JAX_")
