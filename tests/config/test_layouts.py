"""Tensor layouts: the rules they make, and what they refuse."""

import pytest

from colossax.config import Plan, preset
from colossax.errors import PlanError


def test_flat_layouts_leave_rules_alone():
    plan = preset("zero3+megatron_sp")
    assert plan.effective_rules is plan.rules


@pytest.mark.parametrize(
    ("layout", "dim", "params", "activations"),
    [
        ("2d", "mlp", (("row",), ("col",)), (("col",),)),
        ("2.5d", "heads", (("row",), ("col",)), (("col",),)),
        ("3d", "mlp", (("row", "depth"), ("row",)), (("row",),)),
    ],
)
def test_layouts_turn_the_tensor_axis(layout, dim, params, activations):
    rules = preset("zero3+megatron").replace(tensor_layout=layout).effective_rules
    assert rules.params[dim] == params
    assert rules.activations[dim] == activations
    # What is stored over token axes is gathered first, so that axes stand last.
    assert all(choice[-1] == "ulysses" for choice in rules.params["embed"])
    assert rules.activations["batch"] == (("data", "fsdp", "expert", "depth", "row"),)
    assert rules.activations["embed"] == (("col",),)


@pytest.mark.parametrize(
    ("fields", "devices", "message"),
    [
        ({"tensor_layout": "2"}, 8, "unknown '2'"),
        ({"tensor_matmul": "summa"}, 8, "unknown 'summa'"),
        ({"tensor_matmul": "cannon"}, 8, "'cannon' multiplies over row and col"),
        ({"tensor_layout": "2d", "tensor_matmul": "overlap"}, 8, "'overlap' is for"),
        ({"tensor_layout": "3d", "tensor_matmul": "cannon"}, 8, "no third dim"),
        ({"mesh": {"row": 2, "col": 4}}, 8, "'1d' has no use for col=4, row=2; give --plan"),
        ({"mesh": {"tensor": 8}, "tensor_layout": "2d"}, 8, "'2d' has no use for tensor=8; move"),
        (
            {"mesh": {"depth": 2, "row": 2, "col": 2}, "tensor_layout": "2d"},
            8,
            "has no use for depth=2; give --plan.tensor_layout 2.5d",
        ),
        (
            {"mesh": {"row": 2, "col": 4}, "tensor_layout": "2d", "tensor_matmul": "cannon"},
            8,
            "needs as many rows as columns, found row=2, col=4",
        ),
        (
            {"mesh": {"ring": 2, "ring_in": 4}},
            8,
            "found ring_in=4, ring=2; a ring is either 'ring' or 'ring_out' x 'ring_in'",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(fields, devices, message):
    with pytest.raises(PlanError) as caught:
        Plan(**fields).mesh_sizes(devices)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_presets_of_three_kinds_join():
    plan = preset("zero3+megatron_sp+usp")
    assert plan.mesh_sizes(8)["fsdp"] == 8
    assert preset("usp").mesh_sizes(8) | {} == {**plan.mesh_sizes(8), "fsdp": 1} | {
        "ring": 4,
        "ulysses": 2,
    }
    with pytest.raises(PlanError, match="two of one kind"):
        preset("ring+usp")
