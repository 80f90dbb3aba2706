"""What is measured of each step: learning rate, seconds, memory, utilisation."""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan, Precision
from colossax.optim import warmup_cosine
from colossax.planner.counting.flops import Yardstick
from colossax.run.meter import Meter, memory_in_use, yardstick_of
from colossax.run.prepared import Prepared


def metrics(step, *, loss=1.0, skipped=0, **more):
    named = {"loss": loss, "grad_norm": 1.0, "tokens": 100.0, "skipped": skipped, **more}
    return {name: jnp.float32(value) for name, value in named.items()}


def meter(**options):
    return Meter(Yardstick(flops_per_token=6, peak=options.pop("peak", None)), **options)


@pytest.mark.catches("rate-of-the-step-after")
def test_the_learning_rate_is_that_of_the_update_and_skipped_steps_make_none():
    rate = warmup_cosine(1e-3, steps=3000, warmup=5)
    reads = meter(rate=rate)
    assert reads.read(1, metrics(1))["learning_rate"] == 0.0
    assert reads.read(2, metrics(2))["learning_rate"] == pytest.approx(float(rate(1)), rel=1e-6)
    nan = metrics(3, loss=math.nan, skipped=1)
    assert reads.read(3, nan)["learning_rate"] == pytest.approx(float(rate(2)), rel=1e-6)
    again = metrics(4, skipped=1)
    assert reads.read(4, again)["learning_rate"] == pytest.approx(float(rate(2)), rel=1e-6)
    for step in (1024, 1025, 1026, 2999):
        found = reads.read(step, metrics(step, skipped=1))["learning_rate"]
        assert found == pytest.approx(float(rate(step - 2)), rel=1e-6)
    resumed = meter(rate=rate).read(10, metrics(10, skipped=4))
    assert resumed["learning_rate"] == pytest.approx(float(rate(5)), rel=1e-6)
    assert "learning_rate" not in meter().read(1, metrics(1))
    injected = meter(rate=rate).read(1, metrics(1, learning_rate=0.25))
    assert injected["learning_rate"] == 0.25


@pytest.mark.catches("skips-of-before")
def test_steps_skipped_before_a_resumption_are_none_of_this_run():
    reads = meter(skipped=3)
    reads.read(101, metrics(101, skipped=3))
    assert reads.skipped_in_a_row == 0
    reads.read(102, metrics(102, skipped=4))
    assert reads.skipped_in_a_row == 1


@pytest.mark.catches("rate-of-plain-python")
def test_a_learning_rate_of_plain_python_is_asked_step_by_step():
    def rate(updates):
        return 0.5 if updates < 2 else 0.5 * math.cos(updates)

    reads = meter(rate=rate)
    for step in (1, 2, 3, 1500):
        found = reads.read(step, metrics(step))["learning_rate"]
        assert found == rate(step - 1) and isinstance(found, float)


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now = 1.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("colossax.run.meter.time", clock)
    return clock


@pytest.mark.catches("waits-of-another-step")
def test_waiting_for_data_is_counted_step_by_step(clock):
    reads, found = meter(), []
    for step, wait in enumerate((0.5, 0.125, 2.0)):  # a step is read when the next one has begun
        with reads.waiting():
            clock.now += wait
        reads.start()
        clock.now += 0.25
        if step:
            found.append(reads.read(step, metrics(step)))
    found.append(reads.read(3, metrics(3)))
    assert [record["data_seconds"] for record in found] == [0.5, 0.125, 2.0]
    assert [record["step_seconds"] for record in found] == [0.625, 2.25, 0.0]


class Gpu:
    platform = "gpu"

    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


@pytest.mark.catches("memory-of-the-first-device")
def test_memory_is_that_of_the_fullest_device_and_of_this_process(devices):
    full = memory_in_use([Gpu({"bytes_in_use": 5}), Gpu({"bytes_in_use": 9}), Gpu(None)])
    assert full["device_bytes"] == 9
    on_cpu = memory_in_use(devices)
    assert "device_bytes" not in on_cpu
    assert 2**24 < on_cpu["host_bytes"] < 2**40


def test_utilisation_is_told_where_the_peak_is_known(clock):
    assert "mfu" not in meter().read(1, metrics(1))
    reads = meter(peak=1e4)
    reads.start()
    clock.now += 0.5
    assert reads.read(1, metrics(1))["mfu"] == pytest.approx(100 * 6 / 0.5 / 1e4, abs=1e-4)


@pytest.mark.catches("mfu-of-float8-by-16-bit")
@pytest.mark.parametrize(("matmul", "tflops"), [("compute", 989.0), ("float8", 1978.0)])
def test_the_peak_is_that_of_what_the_plan_multiplies_in(matmul, tflops):
    plan = Plan(mesh={"data": 1}, precision=Precision(compute="bfloat16", matmul=matmul))
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="NVIDIA H200")]), size=4)
    step = SimpleNamespace(bound=SimpleNamespace(mesh=mesh))
    task = SimpleNamespace(flops=600, tokens=100)
    found = yardstick_of(Mock(spec=Prepared, task=task, step=step, plan=plan))
    assert found == Yardstick(flops_per_token=6, peak=4 * tflops * 1e12)
