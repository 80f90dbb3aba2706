"""What optimizers hold in a step of Llama 3 8B on 8 GPUs that are not there, beside AdamW."""

import dataclasses
import functools

import pytest

from colossax.aot import parse_target
from colossax.planner import inspect_run
from colossax.recipes import recipe

pytestmark = pytest.mark.aot

LAYERS, D, F, V, DEVICES = 32, 4096, 14_336, 128_256, 8
SIDES = [(D, 4096), (4096, D), (D, 1024), (D, 1024), (D, F), (D, F), (F, D)]
MATRICES = LAYERS * sum(a * b for a, b in SIDES)
TABLES, NORMS = 2 * V * D, (2 * LAYERS + 1) * D
FACTORS = LAYERS * sum(a + b for a, b in SIDES) + 2 * (V + D)
RANK = 512
DIRECTIONS = LAYERS * RANK * sum(min(a, b) + 2 * max(a, b) for a, b in SIDES)
LARGEST = 4 * LAYERS * D * F // DEVICES
"""Bytes of a device's part of one stack of matrices, in float32."""

BYTES = {
    "muon": 4 * (MATRICES + NORMS + TABLES) + 4 * (NORMS + TABLES),
    "adafactor": 4 * (FACTORS + NORMS),
    "came": 4 * (MATRICES + TABLES) + 8 * (FACTORS + NORMS),
    "galore": 4 * DIRECTIONS + 8 * (NORMS + TABLES),
    "8bit": (2 + 8 / 256) * (MATRICES + TABLES) + 8 * NORMS,
}
"""Of state, on all devices."""

CHANGES = {"8bit": {"state": "8bit"}, "galore": {"name": "galore", "rank": RANK}}


@functools.cache
def memory(**changes):
    config = recipe("llama3_8b")
    config = config.replace(
        optimizer=dataclasses.replace(config.optimizer, **changes),
        data=dataclasses.replace(config.data, global_batch=DEVICES),
    )
    return inspect_run(config, parse_target(f"h100:1x{DEVICES}")).memory


@pytest.mark.catches("eight-bits-searched")
@pytest.mark.parametrize("name", BYTES)
def test_a_step_holds_the_state_and_hardly_more_than_with_adamw(name):
    found = memory(**CHANGES.get(name, {"name": name}))
    # Factors of a side that no device shares lie whole on each.
    assert found.terms["optimizer"] == pytest.approx(BYTES[name] / DEVICES, rel=0.02, abs=2**23)
    beside = LARGEST + (name == "galore") * 4 * LAYERS * RANK * D // DEVICES  # its directions
    assert found.temp_bytes <= memory(name="adamw").temp_bytes + beside
