"""Mosaic kernels are chosen on Hopper, with an assembler that is right, and nowhere else."""

import pytest

from colossax.pallas import Target
from colossax.pallas.mosaic import why_not_hardware

VERSION = "colossax.pallas.mosaic.hardware.cuda_runtime_version"


@pytest.mark.parametrize(
    ("platform", "capability", "reason"),
    [
        ("gpu", (9, 0), None),
        ("gpu", None, "is not known"),
        *(("gpu", found, f"found {found[0]}.{found[1]}") for found in [(7, 0), (8, 0), (8, 6)]),
        *(("gpu", found, f"found {found[0]}.{found[1]}") for found in [(8, 9), (10, 0), (12, 0)]),
        ("cpu", None, "the target is 'cpu'"),
        ("tpu", None, "the target is 'tpu'"),
    ],
)
def test_only_hopper_takes_them(platform, capability, reason, monkeypatch):
    monkeypatch.setattr(VERSION, lambda: None)
    found = why_not_hardware(Target(platform=platform, compute_capability=capability))
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize(
    ("version", "right"),
    [
        (None, True),
        ((12, 6, 0), True),
        ((12, 8, 0), False),
        ((12, 9, 0), False),
        ((12, 9, 1), True),
        ((13, 0, 0), True),
    ],
)
def test_assemblers_that_are_wrong_are_named(version, right, monkeypatch):
    monkeypatch.setattr(VERSION, lambda: version)
    found = why_not_hardware(Target(platform="gpu", compute_capability=(9, 0)))
    if right:
        assert found is None
    else:
        assert f"CUDA {'.'.join(map(str, version))} miscompiles" in found
