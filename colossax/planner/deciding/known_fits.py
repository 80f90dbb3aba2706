"""What searches found before, kept in the cache folder."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from colossax.aot import Target
from colossax.config import HOST_KINDS, STATE_KINDS, Plan, to_json
from colossax.files import write_whole
from colossax.offload import (
    device_memory,
)
from colossax.planner.deciding.trial import Budget, StepBytes, Trial, with_shares
from colossax.sharding import compiler_options

FORMAT = 2
"""Of what is kept in the cache folder; 2 since choices are by what a step waits for."""


def fit_key(plan: Plan, trial: Trial, budget: Budget, target: Target | None) -> str:
    """Hash of all that decides a result.

    The program with every layer on the host stands for model, loss, optimizer, batch and clipping:
    a change of any that moves a byte shows in it. Free host memory does not count, it is different
    every time.
    """
    placeless = with_shares(plan, dict.fromkeys(HOST_KINDS, 0.0))
    unbudgeted = dataclasses.replace(placeless.offload, host_gb=None)
    device = trial.step.bound.mesh.devices.flat[0]
    facts = {
        "program": trial.lowered.as_text(),
        "plan": to_json(placeless.replace(offload=unbudgeted)),
        "options": compiler_options(trial.step.bound),
        "devices": target.name if target is not None else device.device_kind,
        "memory": device_memory(list(trial.step.bound.mesh.devices.flat), target),
        "device_bytes": budget.device_bytes,
        "versions": [FORMAT, jax.__version__, jaxlib.__version__],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def known_fit(entry: Path, layers: int, budget: Budget) -> dict[str, Any] | None:
    """What was kept, if it is valid and within the budgets."""
    try:
        record = json.loads(entry.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if _is_valid(record, layers) and _bytes_of(record).within(budget) else None


def _is_valid(record: Any, layers: int) -> bool:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return False
    counts = record.get("resident")
    numbers = [record.get("layers"), record.get("device_bytes"), record.get("host_bytes")]
    return (
        isinstance(counts, dict)
        and set(STATE_KINDS) <= set(counts) <= set(HOST_KINDS)
        and all(type(number) is int for number in [*numbers, *counts.values()])
        and record["layers"] == layers
        and all(0 <= count <= layers for count in counts.values())
    )


def _bytes_of(record: Mapping[str, Any]) -> StepBytes:
    return StepBytes(device=record["device_bytes"], host=record["host_bytes"])


def keep_fit(entry: Path, record: Mapping[str, Any]) -> None:
    """Write a result whole or not at all; without room for it the next run looks again."""
    with contextlib.suppress(OSError):
        write_whole(entry, json.dumps({"format": FORMAT, **record}))
