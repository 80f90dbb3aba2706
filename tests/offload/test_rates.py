"""Rates: measured in the right units, kept, found again, and refused when damaged."""

import dataclasses
import json
import re
import time

import jax
import jax.numpy as jnp
import pytest

from colossax.errors import InputError
from colossax.offload import (
    PipelinedTest,
    Rates,
    Setting,
    Update,
    UpdateRate,
    load_rates,
    measure_rates,
    rates_path,
    save_rates,
)
from colossax.offload import rates as module
from colossax.pallas.bench import Effort

SETTING = Setting(
    copy_bytes=2**20,
    cpu_parameters=2**16,
    device_parameters=2**17,
    matmul=128,
    matmul_dtype=jnp.float32,
    effort=Effort(seconds=0.01, repeats=3),
)
MOVED = UpdateRate(
    name="sgd", bytes_per_direction=4.0, cpu_parameters_per_s=3e9, device_parameters_per_s=4e11
)
RATES = Rates(
    device_kind="NVIDIA H200",
    platform="gpu",
    jax="0.10.2",
    to_device_bytes_per_s=5e10,
    to_host_bytes_per_s=4.5e10,
    both_ways_bytes_per_s=4e10,
    matmul_flops_per_s=7e14,
    updates=(MOVED,),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("COLOSSAX_CACHE", str(folder))
    return folder


def test_a_cpu_is_measured_and_says_that_it_is_one():
    seen = []

    def step(kept, grads):
        seen.append((kept.shape, grads.shape))
        return kept - grads

    update = Update(name="sgd", bytes_per_direction=4.0, start=lambda p: p, step=step)
    found = measure_rates([update], SETTING)
    assert (found.device_kind, found.platform, found.jax) == ("cpu", "cpu", jax.__version__)
    assert seen == [((2**16,), (2**16,))], "the device is the CPU: measured once"
    # Of the right order, whatever the machine: a unit forgotten is a factor of 1e6.
    for rate in (found.to_device_bytes_per_s, found.to_host_bytes_per_s):
        assert 1e7 < rate < 1e12
    assert 1e6 < found.updates[0].cpu_parameters_per_s < 1e12
    assert found.updates[0].device_parameters_per_s == found.updates[0].cpu_parameters_per_s
    assert 1e7 < found.matmul_flops_per_s < 1e14


def test_another_device_is_measured_beside_the_cpu(monkeypatch, devices):
    """A second CPU device stands for a GPU; each gets its own number of parameters."""
    seen = []

    def step(kept, grads):
        seen.append(grads.shape)
        return kept - grads

    monkeypatch.setattr(module, "cpu_device", lambda: devices[1])
    update = Update(name="sgd", bytes_per_direction=4.0, start=lambda p: p, step=step)
    measure_rates([update], SETTING)
    assert seen == [(2**16,), (2**17,)]


def test_rates_are_bytes_and_parameters_over_seconds(monkeypatch):
    """With a clock that says 0.5 s a call and 2 s for both ways."""
    seconds = {"to device": 0.5, "to host": 1.0, "both": 2.0, "update": 0.5}
    moved = {}

    def timed(functions, sets, effort):
        for name, function in functions.items():
            first, second = (jax.tree.leaves(function(*sets[0])) for _ in range(2))
            kinds = [x.sharding.memory_kind for x in second]
            same = any(a is b for a, b in zip(first, second, strict=True))
            moved[name] = "nothing" if same else kinds
        return {name: [seconds[name]] for name in functions}

    monkeypatch.setattr(module, "time_calls", timed)
    update = Update(name="sgd", bytes_per_direction=4.0, start=lambda p: p, step=lambda p, g: p - g)
    found = measure_rates([update], SETTING)
    assert moved == {
        "to device": ["device"],
        "to host": ["pinned_host"],
        "both": ["device", "pinned_host"],
        "update": ["device"],
    }
    assert found.to_device_bytes_per_s == 2**21
    assert found.to_host_bytes_per_s == 2**20
    assert found.both_ways_bytes_per_s == 2**19
    assert found.updates[0].cpu_parameters_per_s == 2**17


def test_a_copy_moves_its_bytes(devices):
    """What is timed is a copy: no two kinds of memory share a buffer."""
    start = time.perf_counter()
    small = module._copies(devices[0], dataclasses.replace(SETTING, copy_bytes=2**22))
    assert all(2**22 / rate < time.perf_counter() - start for rate in small)
    for kind, other in (("device", "pinned_host"), ("pinned_host", "device")):
        source = jax.device_put(jnp.ones(16), module._memory(devices[0], kind))
        moved = jax.device_put(source, module._memory(devices[0], other))
        assert moved.sharding.memory_kind == other
        assert moved.unsafe_buffer_pointer() != source.unsafe_buffer_pointer()


TESTED = PipelinedTest(jaxlib="0.10.2", losses=40, largest_difference=1e-8, passed=True)


@pytest.mark.parametrize(
    "tested", [TESTED, dataclasses.replace(TESTED, largest_difference=None, passed=False)]
)
def test_the_verdict_on_pipelined_transfers_is_kept_with_rates(tested):
    rates = dataclasses.replace(RATES, pipelined=tested)
    path = save_rates(rates)
    assert load_rates("NVIDIA H200") == rates
    found = json.loads(path.read_text())
    del found["pipelined"]
    path.write_text(json.dumps(found))
    assert load_rates("NVIDIA H200") == RATES, "as files without a verdict are read"


def test_rates_are_found_again_by_kind_of_device(cache):
    assert load_rates("NVIDIA H200") is None
    path = save_rates(RATES)
    assert path == rates_path("NVIDIA H200") == cache / "rates" / "nvidia-h200.json"
    assert load_rates("NVIDIA H200") == RATES
    assert load_rates("NVIDIA H100 80GB HBM3") is None
    faster = dataclasses.replace(RATES, to_host_bytes_per_s=6e10)
    save_rates(faster)
    assert load_rates("NVIDIA H200") == faster
    assert [file.name for file in path.parent.iterdir()] == ["nvidia-h200.json"]


def test_rates_may_be_written_elsewhere(tmp_path):
    assert save_rates(RATES, tmp_path / "mine.json") == tmp_path / "mine.json"
    assert load_rates("NVIDIA H200") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "nvidia-h200.json: cannot be read .*; measure again with colossax bench offload"),
        ("{}", "nvidia-h200.json: .*missing.*; check the values given"),
        (
            '{"to_host_bytes": 1}',
            "unknown field 'to_host_bytes'; did you mean 'to_host_bytes_per_s'?",
        ),
        ("[]", "nvidia-h200.json: expected an object of fields"),
    ],
)
def test_damaged_files_are_refused(text, message):
    path = save_rates(RATES)
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_rates("NVIDIA H200")


def test_a_folder_that_cannot_be_made_is_named(cache):
    cache.write_text("a file")
    with pytest.raises(InputError, match=r"nvidia-h200.json: cannot be written .*COLOSSAX_CACHE"):
        save_rates(RATES)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_numbers_that_cannot_be_measured_are_refused(value):
    with pytest.raises(InputError, match=r"rates.both_ways_bytes_per_s: found .*; give what was"):
        dataclasses.replace(RATES, both_ways_bytes_per_s=value)
    with pytest.raises(InputError, match="update 'sgd'.cpu_parameters_per_s: found"):
        dataclasses.replace(MOVED, cpu_parameters_per_s=value)


def test_rates_without_an_update_are_refused():
    with pytest.raises(InputError, match=r"rates.updates: found none; measure at least one"):
        dataclasses.replace(RATES, updates=())


def test_a_missing_cpu_backend_is_named(monkeypatch):
    def none(**_):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(InputError, match="leaves out the CPU, which is wanted; add ',cpu'"):
        module.cpu_device()


def test_a_device_without_host_memory_is_named(devices):
    with pytest.raises(InputError, match=re.escape("device cpu: has no hbm memory, only device,")):
        module._memory(devices[0], "hbm")
