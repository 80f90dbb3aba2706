"""Layers that stay on the device within a budget, compiled for GPUs that are not there."""

import dataclasses
import json
import subprocess
import sys

import pytest

from colossax.aot import parse_target, target_devices
from colossax.config import LossConfig, OffloadConfig, Plan, Precision, Segment
from colossax.errors import PlanError
from colossax.models import LlamaConfig
from colossax.offload import GB, working_set_bytes
from colossax.planner.counting.compiled import compiled_step, settle_for_target
from colossax.planner.deciding import fitting
from colossax.planner.task_step import task_step
from colossax.tasks import DataConfig, TrainConfig, task_of

pytestmark = pytest.mark.aot

D, F, V, T, CHUNKS = 1024, 2816, 32_000, 1024, 8
N = 4 * D * D + 3 * D * F
"""Parameters in a layer's matrices."""
LAYERS = 12
BYTES = 12 + 2
"""Of a layer's parameter: itself, two moments, its gradient until the norm is known."""


def run(layers=LAYERS, **offload):
    model = LlamaConfig(
        vocab=V, embed=D, layers=layers, heads=D // 128, kv_heads=D // 128, mlp=F, max_seq=T
    )
    plan = Plan(
        segments=(Segment(remat="full"),),
        precision=Precision(compute="bfloat16"),
        loss=LossConfig(vocab_chunks=CHUNKS),
        offload=OffloadConfig(**offload),
    )
    return TrainConfig(
        recipe="budget",
        model=model,
        plan=plan,
        data=DataConfig(seq_len=T, global_batch=1),
        steps=10,
        clip_norm=1.0,
    )


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def target():
    return parse_target("h200:1x1")


@pytest.fixture(scope="module")
def everything(target):
    """The program with every layer in host memory."""
    config = run(parameters=1.0, optimizer=1.0, activations=1.0)
    return compiled_step(config, target)[1]


def test_the_working_set_is_what_the_formula_says(everything):
    formula = working_set_bytes(
        vocab=V,
        embed=D,
        layers=LAYERS,
        layer_params=N,
        largest_matrix=D * F,
        tokens=T,
        vocab_chunks=CHUNKS,
    )
    assert 0.95 <= everything.device_bytes / sum(formula.values()) <= 1.05
    assert everything.host_bytes == pytest.approx(LAYERS * (BYTES * N + 2 * T * D), rel=0.001)


def test_a_budget_is_filled_and_kept(target, everything):
    """Once layers stay, gradients of embedding and head may be alive at once: room lost."""
    device = everything.device_bytes + LAYERS // 2 * BYTES * N
    offload = {"auto": True, "device_gb": device / GB, "host_gb": 3.0}
    config, settled = settle_for_target(run(**offload), target)
    fitted = settled.fitted
    assert fitted.compiles in (2, 3)
    program = compiled_step(config, target)[1]
    assert (program.device_bytes, program.host_bytes) == (fitted.device_bytes, fitted.host_bytes)
    assert device - BYTES * N - 6 * V * D <= program.device_bytes <= device
    again, known = settle_for_target(run(**offload), target)
    assert again == config and known.fitted == dataclasses.replace(fitted, compiles=0)


def test_formulas_of_host_arrays_are_what_the_compiler_counts(target, everything):
    """They stand in for it where it does not count, on CPUs."""
    config = run(parameters=1.0, optimizer=1.0, activations=1.0)
    trial = fitting.Trial(
        lambda plan: task_step(task_of(config), plan, target_devices(target)),
        config.plan,
        task_of(config).shapes,
        target,
    )
    arrays = trial.host_arrays()
    assert arrays == {
        "parameters": 4 * LAYERS * N,
        "optimizer": (8 + 2) * LAYERS * N,
        "activations": 2 * LAYERS * T * D,
    }
    assert sum(arrays.values()) == pytest.approx(everything.host_bytes, rel=1e-4)


def test_a_model_that_both_memories_cannot_hold_is_refused(target):
    with pytest.raises(PlanError, match=r"plan\.offload\.host_gb: \d\.\d+ GB are missing"):
        settle_for_target(run(auto=True, device_gb=2.0, host_gb=0.5), target)


def test_inspect_says_what_was_chosen():
    words = [
        *("llama_tiny", "--target=h200:1x1", "--json", "--plan.offload=auto"),
        *("--plan.offload.host_gb=96", "--plan.offload.device_gb=1"),
    ]
    command = [sys.executable, "-m", "colossax", "inspect", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "plan.offload auto: of 4 layers the device keeps parameters of 4" in done.stderr
    assert json.loads(done.stdout)["fits"]
    told = [*command[:-2], "--plan.offload.device_gb=0.175"]  # and nothing of the host
    refused = subprocess.run(told, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "GB for each of them stay in host memory and 0.000 GB are given" in refused.stderr
