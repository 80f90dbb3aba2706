"""Kernels are chosen for the devices that a program runs on."""

import types

import jax
import pytest

from colossax.config import Plan
from colossax.pallas import Target, current_target, target
from colossax.pallas.target import on_device, target_of
from colossax.sharding import use

HOPPER = types.SimpleNamespace(platform="cuda", compute_capability="9.0")


def test_a_device_says_what_it_is():
    assert target_of(HOPPER) == Target(platform="gpu", compute_capability=(9, 0))
    small = types.SimpleNamespace(platform="cuda", compute_capability="9.0", core_count=114)
    assert target_of(small).multiprocessors == 114
    assert target_of(types.SimpleNamespace(platform="tpu")) == Target(platform="tpu")
    assert target_of(jax.devices()[0]) == Target(platform="cpu", device_kind="cpu")


def test_what_is_asked_for_comes_before_the_mesh_and_that_before_the_default(devices):
    assert current_target().platform == "cpu"
    with on_device(HOPPER):
        assert current_target() == target_of(HOPPER)
        with target("gpu", compute_capability=(8, 0)):
            assert current_target().compute_capability == (8, 0)
        # A mesh of CPU devices on a machine that has a GPU.
        with use(Plan(mesh={"fsdp": 8}).bind(devices)):
            assert current_target().platform == "cpu"
        with use(None):
            assert current_target() == target_of(HOPPER)


@pytest.mark.parametrize("chosen", ["cpu", None])
def test_the_default_device_is_honoured(chosen, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [HOPPER])
    with jax.default_device(chosen):
        assert current_target().platform == ("gpu" if chosen is None else "cpu")
