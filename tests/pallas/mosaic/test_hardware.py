"""Mosaic kernels are chosen on Hopper, with an assembler that is right, and nowhere else."""

import jax.numpy as jnp
import pytest

from colossax.pallas import Target
from colossax.pallas.attention import Mask
from colossax.pallas.attention.api import IMPLEMENTATIONS as OF_ATTENTION
from colossax.pallas.attention.spec import AttentionSpec
from colossax.pallas.choice import choose, reasons
from colossax.pallas.grouped_matmul.api import IMPLEMENTATIONS as OF_GROUPS
from colossax.pallas.grouped_matmul.spec import GroupedSpec
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


HALF = jnp.dtype("bfloat16")
CALLS = {
    "attention": (
        OF_ATTENTION,
        AttentionSpec(
            batch=1,
            q_length=128,
            kv_length=128,
            heads=1,
            kv_heads=1,
            head_dim=128,
            v_head_dim=128,
            dtype=HALF,
            mask=Mask(causal=True),
        ),
    ),
    "grouped_matmul": (
        OF_GROUPS,
        GroupedSpec(rows=128, groups=2, features_in=128, features_out=128, dtype=HALF),
    ),
}


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("lost", [False, True])
def test_where_register_limits_are_lost_kernels_run_only_if_named(operation, lost, monkeypatch):
    monkeypatch.setattr("colossax.pallas.mosaic.hardware.linked_by_nvjitlink", lambda: lost)
    hopper = Target(platform="gpu", compute_capability=(9, 0))
    call = CALLS[operation]
    assert (choose(operation, *call, hopper) == "mosaic") is not lost
    assert choose(operation, *call, hopper, "mosaic") == "mosaic"
    said = reasons(*call, hopper)["mosaic"]
    assert said is None or ("ignores their register limits" in said and lost)
    assert "need an NVIDIA GPU" in str(reasons(*call, Target(platform="cpu"))["mosaic"])
