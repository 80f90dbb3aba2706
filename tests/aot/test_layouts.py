"""Layers of every layout compiled for GPUs: what they send equals the formulas."""

import dataclasses
import json

import pytest

from colossax.aot import parse_target
from colossax.config import OffloadConfig, Segment
from colossax.planner import inspect_run
from colossax.planner.deciding import candidates as layouts
from colossax.planner.deciding.candidates import compare_layouts, legal_layouts
from colossax.recipes import recipe
from tests.aot.test_inspection import GIB, colossax

pytestmark = pytest.mark.aot

TARGET = parse_target("h100:1x8")


def small():
    """Layers of Llama 3 8B, one row of 8192 tokens for each device."""
    config = recipe("llama3_8b")
    return config.replace(model=dataclasses.replace(config.model, layers=4))


@pytest.mark.parametrize(
    "label",
    [
        "ring=2 ulysses=2 tensor=2 zigzag",
        "ring=8 zigzag",
        "ring=8 all_gather",
        "fsdp=2 ulysses=2 tensor=2",
        "2d row=2 col=4",
        "2.5d depth=2 row=2 col=2",
        "3d depth=2 row=2 col=2",
        "tensor=8",
    ],
)
def test_a_layer_sends_what_its_formula_says(label, monkeypatch):
    """Within 2 %; the bar is 5 %."""
    monkeypatch.setattr(
        "colossax.planner.deciding.candidates.legal_layouts",
        lambda *a: (one for one in legal_layouts(*a) if one.label == label),
    )
    (found,) = compare_layouts(small(), TARGET)
    assert found.compiled_bytes == pytest.approx(found.predicted_bytes, rel=0.02)
    assert found.layer_bytes is not None and found.layer_bytes > 2**20


def test_every_factorisation_that_divides_is_legal():
    labels = [one.label for one in legal_layouts(small(), TARGET)]
    assert len(labels) == len(set(labels))
    # 20 meshes over fsdp, ring, ulysses, tensor, those with a ring in two schemes; five of row,
    # col and the rest, of which depth, row and col stand for 2.5d and 3d.
    assert sum("=" in label and not label.startswith(("2", "3")) for label in labels) == 30
    assert {label.split()[0] for label in labels if label[0] in "23"} == {"2d", "2.5d", "3d"}


def test_a_budget_for_shares_to_be_found_does_not_stand_in_the_way():
    """The pass that is compared has none of them."""
    config, target = recipe("llama_stdlib"), parse_target("h100:1x2")
    kept = Segment(remat="full", offload="input+mlp", mlp_share="auto")
    plan = config.plan.replace(segments=(kept,), offload=OffloadConfig(host_gb=64.0))
    one = layouts._one_pass(config.replace(plan=plan), target)
    assert list(legal_layouts(one, target))


def test_a_million_tokens_on_64_devices():
    config = recipe("llama3_8b_1m")
    assert config.data.seq_len == 2**20
    one = inspect_run(config, parse_target("h100:8x8"))
    assert one.fits
    assert one.memory.total_bytes <= 16 * GIB
    rings = [link for link in one.links if link.totals.kind == "collective-permute"]
    assert rings and all(link.totals.overlapped for link in rings)


def test_the_command_line_ranks_layouts():
    done = colossax("inspect", "llama_tiny", "--target=h100:1x2", "--compare-layouts", "--json")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    sent = [(not one["fits"], one["compiled_bytes"]) for one in found]
    assert sent == sorted(sent)
    assert {"ring=2 zigzag", "ulysses=2", "tensor=2", "fsdp=2"} <= {one["label"] for one in found}
    table = colossax("inspect", "llama_tiny", "--target=h100:1x2", "--compare-layouts", "1")
    assert table.stdout.count("not compiled") == len(found) - 1
    refused = colossax("inspect", "llama_tiny", "--target=h100:1x7", "--compare-layouts")
    assert refused.returncode == 2
    assert "--compare-layouts: " in refused.stderr
