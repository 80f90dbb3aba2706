"""What cutting layers by speed takes, and what it gains over even cuts, modelled.

CPU-seconds of `cut_layers` and `order_devices` on made-up layers, devices and links, and of
settling `plan.pipeline.cuts auto` for recipes on H100s that are not there, at given speeds of their
stages; gain is the slowest stage's modelled seconds with even cuts, devices as given, over those
found.
Nothing runs on a device.

    python bench/stage_cuts.py [--out FILE]
"""

import argparse
import dataclasses
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.REPOSITORY))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax

from colossax.aot import parse_target
from colossax.config import PipelineConfig
from colossax.pipeline.cuts import Cuts, LayerCost, Link, StageDevice, cut_layers
from colossax.pipeline.order import Ordered, order_devices
from colossax.planner.task_step import settle_task
from colossax.recipes import recipe
from colossax.tasks import task_of

KINDS = (
    StageDevice(speed=1.0, memory_bytes=80e9),
    StageDevice(speed=0.5, memory_bytes=40e9),
    StageDevice(speed=0.25, memory_bytes=24e9),
)
BAR_S = 1.0
"""Of 160 layers on 64 devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Layers and devices; whether they may change places, and links between all of them."""

    name: str
    layers: Sequence[LayerCost]
    devices: Sequence[StageDevice]
    ordered: bool = True
    links: Sequence[Sequence[Link]] | None = None

    def solved(self) -> Cuts | Ordered:
        if self.ordered:
            return order_devices(self.layers, self.devices, links=self.links)
        links = self.links and [self.links[n][n + 1] for n in range(len(self.devices) - 1)]
        return cut_layers(self.layers, self.devices, links=links)

    @property
    def even_s(self) -> float | None:
        links = self.links and [self.links[n][n + 1] for n in range(len(self.devices) - 1)]
        return cut_layers(self.layers, self.devices, links=links).modelled_even_s


def layers(count: int, seconds: Callable[[], float]) -> list[LayerCost]:
    return [
        LayerCost(seconds=seconds(), state_bytes=2e9, kept_bytes=2e7, out_bytes=1.3e8)
        for _ in range(count)
    ]


def between(count: int, rate: Callable[[int, int], float]) -> list[list[Link]]:
    """The same both ways."""
    rates = [[rate(a, b) if a < b else 0.0 for b in range(count)] for a in range(count)]
    return [
        [Link(bytes_per_s=max(rates[a][b], rates[b][a]) or 1.0) for b in range(count)]
        for a in range(count)
    ]


def cases() -> list[Case]:
    chance = random.Random(0)

    def unequal() -> float:
        return chance.uniform(0.005, 0.02)

    def any_rate(a: int, b: int) -> float:
        return chance.uniform(2e9, 4e10)

    def equal() -> float:
        return 0.01

    def differing(count: int) -> list[StageDevice]:
        return [
            StageDevice(speed=chance.uniform(0.25, 1), memory_bytes=chance.uniform(24e9, 80e9))
            for _ in range(count)
        ]

    three = [chance.choice(KINDS) for _ in range(64)]
    halves = [KINDS[number // 32] for number in range(64)]
    return [
        Case(name="given order", layers=layers(160, unequal), devices=three, ordered=False),
        Case(
            name="given order, links",
            layers=layers(160, unequal),
            devices=three,
            ordered=False,
            links=between(64, any_rate),
        ),
        Case(name="half at half speed", layers=layers(160, equal), devices=halves[24:40]),
        Case(name="two kinds", layers=layers(160, unequal), devices=halves),
        Case(name="three kinds", layers=layers(160, unequal), devices=three),
        Case(
            name="two kinds, two islands",
            layers=layers(160, unequal),
            devices=halves,
            links=between(64, lambda a, b: 4e10 if a // 32 == b // 32 else 2e9),
        ),
        Case(name="all differ", layers=layers(160, unequal), devices=differing(12)),
        Case(
            name="all differ, links too",
            layers=layers(160, unequal),
            devices=differing(12),
            links=between(12, any_rate),
        ),
        Case(
            name="all differ, links too",
            layers=layers(160, unequal),
            devices=differing(64),
            links=between(64, any_rate),
        ),
    ]


def measured(case: Case) -> dict[str, Any]:
    clock = common.Clock()
    found = case.solved()
    cpu_s = clock.read()["cpu_s"]
    cuts = found.cuts if isinstance(found, Ordered) else found
    return {
        "case": case.name,
        "layers": len(case.layers),
        "devices": len(case.devices),
        "search": ("exact" if found.exact else "bounded") if isinstance(found, Ordered) else "none",
        "cpu_s": cpu_s,
        "modelled_s": cuts.slowest_s,
        "modelled_gain": case.even_s and case.even_s / cuts.slowest_s,
    }


RECIPES = (
    ("llama3_8b", {"stage": 4, "fsdp": 2}, "1,1,1,1", 16),
    ("llama3_8b", {"stage": 4, "fsdp": 2}, "2,1,1,1", 16),
    ("llama3_8b", {"stage": 4, "fsdp": 2}, "1,1,0.5,0.5", 16),
    ("llama3_8b", {"stage": 8}, "1,1,1,1,0.5,0.5,0.5,0.5", 16),
    ("gpt2_124m", {"stage": 8}, "1,1,1,1,1,1,1,1", 1024),
    ("gpt2_124m", {"stage": 4, "fsdp": 2}, "1,1,1,0.5", 1024),
)
"""Name, mesh, speeds of the stages, rows of a batch."""


def settled(name: str, mesh: dict[str, int], speeds: str, rows: int) -> dict[str, Any]:
    """What `plan.pipeline.cuts auto` comes to."""
    config = recipe(name)
    config = config.replace(data=dataclasses.replace(config.data, global_batch=rows))
    pipeline = PipelineConfig(cuts="auto", speeds=speeds)
    plan = config.plan.replace(mesh=mesh, pipeline=pipeline)
    target = parse_target("h100:1x8")
    clock = common.Clock()
    found = settle_task(task_of(config), plan, jax.devices(), target=target)
    cpu_s = clock.read()["cpu_s"]
    line = found.reasons["pipeline.cuts"]
    gain = re.search(r"a modelled ([\d.]+) times as fast as cut evenly", line)
    return {
        "recipe": name,
        "mesh": ",".join(f"{axis}={size}" for axis, size in mesh.items()),
        "speeds": speeds,
        "cuts": ",".join(map(str, found.plan.pipeline.cuts)),
        "modelled_gain": float(gain.group(1)) if gain else 1.0,
        "cpu_s": cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "stage_cuts.json")
    arguments = parser.parse_args()
    rows = [measured(case) for case in cases()]
    print(common.table(list(rows[0]), [list(row.values()) for row in rows]))
    print("modelled_gain: none where even cuts exceed a device's memory\n")
    recipes = [settled(*one) for one in RECIPES]
    print(common.table(list(recipes[0]), [list(row.values()) for row in recipes]))
    common.write_json(
        arguments.out,
        {
            "benchmark": "stage_cuts",
            "versions": common.versions(),
            "hardware": common.hardware(),
            "bar_s": BAR_S,
            "rows": rows,
            "recipes": recipes,
        },
    )


if __name__ == "__main__":
    main()
