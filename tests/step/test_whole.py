"""A ring that divides no dim of the parameters: they stay whole along it, and a line says so."""

import contextlib
import io
import json
import logging
import math

import jax
import optax
import pytest

from colossax.cli import main
from colossax.config import preset
from colossax.models import LlamaConfig, maker
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.launching import SMALL, write_text
from tests.oracle import assert_losses_close

CONFIG = LlamaConfig(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, mlp=48, max_seq=32)


def step_on(mesh):
    plan = preset("zero3", mesh=mesh)
    devices = jax.devices()[: math.prod(mesh.values())]
    return build_step(maker(CONFIG), optax.adamw(1e-3), next_token_loss(), plan, devices=devices)


@pytest.mark.catches("whole-in-silence")
def test_a_line_says_what_it_costs(devices, caplog):
    with caplog.at_level(logging.WARNING):
        step = step_on({"data": 2, "ring": 3})
    leaves = [
        math.prod(i.shape) * 4
        for i in jax.tree.leaves(step.infos)
        if {"embed", "embed:table"} & {*i.dims}
    ]
    cost = 4 * sum(size - size // 3 for size in leaves)  # parameter, gradient and two moments
    [line] = [r.getMessage() for r in caplog.records if "plan.mesh" in r.getMessage()]
    assert "ring=3 does not divide" in line
    assert f"costs {cost:,} bytes per device" in line


def test_a_ring_that_divides_says_nothing(devices, caplog):
    step_on({"data": 2, "ring": 2})
    assert not caplog.records


def train(text, out, steps, *words):
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = main(["train", *SMALL, f"--data={text}", f"--out={out}", f"--steps={steps}", *words])
    assert code == 0
    lines = [json.loads(line) for line in told.getvalue().splitlines()]
    return [line["loss"] for line in lines if "step" in line]


@pytest.mark.catches("ring-must-divide")
def test_a_run_on_three_by_two_is_that_of_one_device_and_goes_on_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    text = write_text(tmp_path / "text")
    one = train(text, tmp_path / "one", 3, "--devices=1")
    there, back = (
        ["--devices=6", "--plan.mesh=ring=3,data=2"],
        ["--devices=2", "--plan.mesh=fsdp=2"],
    )
    assert_losses_close(train(text, tmp_path / "six", 2, *there), one[:2])
    assert_losses_close(train(text, tmp_path / "six", 3, *back, "--resume"), one[2:])
