"""Names to PartitionSpecs, second choices, refusals by parameter name."""

import dataclasses
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from colossax.config import ExpertsConfig, Plan, preset
from colossax.errors import PlanError
from colossax.sharding import explain, explain_html, left_whole, resolve, validate
from colossax.sharding.expert_group import expert_group
from colossax.typing import ParamInfo


def info(path, dims, shape):
    return ParamInfo(path=path, dims=dims, shape=shape, dtype=np.dtype("float32"))


@pytest.mark.catches("weights-stay-split")
@pytest.mark.parametrize(
    ("name", "role", "dims", "shape", "spec"),
    [
        ("zero3+megatron", "params", ("embed", "mlp"), (8, 16), P("fsdp", "tensor")),
        ("zero3+megatron", "weights", ("embed", "mlp"), (8, 16), P(None, "tensor")),
        ("zero3+megatron", "optimizer", ("embed", "mlp"), (8, 16), P("fsdp", "tensor")),
        ("zero1+megatron", "params", ("embed", "mlp"), (8, 16), P(None, "tensor")),
        ("zero1+megatron", "optimizer", ("embed", "mlp"), (8, 16), P("fsdp", "tensor")),
        ("ddp+megatron", "gradients", ("embed", "mlp"), (8, 16), P(None, "tensor")),
        ("zero3+megatron", "params", ("embed", "embed"), (8, 8), P("fsdp", None)),
        (
            "zero3+megatron",
            "activations",
            ("batch", "seq", "embed"),
            (4, 6, 8),
            P("fsdp", None, None),
        ),
        ("zero3+megatron", "activations", ("batch", "seq:residual"), (4, 6), P("fsdp", None)),
        (
            "zero3+megatron_sp",
            "activations",
            ("batch", "seq:residual"),
            (4, 6),
            P("fsdp", "tensor"),
        ),
        ("zero3+megatron", "params", (None, "unknown"), (3, 5), P(None, None)),
    ],
)
def test_presets_resolve(devices, name, role, dims, shape, spec):
    bound = preset(name, mesh={"fsdp": 4, "tensor": 2}).bind(devices)
    assert resolve(bound, role, dims, shape) == spec


def test_zero1_splits_state_over_data_and_fsdp(devices):
    bound = preset("zero1", mesh={"data": 2, "fsdp": 4}).bind(devices)
    assert resolve(bound, "optimizer", ("embed", "mlp"), (8, 16)) == P(("data", "fsdp"), None)


@pytest.mark.catches("rule-second-choice")
def test_second_choice_when_an_axis_is_taken(devices):
    rules = Plan().rules.updated(params={"mlp": [["fsdp"], ["tensor"]]})
    bound = Plan(mesh={"fsdp": 4, "tensor": 2}, rules=rules).bind(devices)
    assert resolve(bound, "params", ("embed", "mlp"), (8, 8)) == P("fsdp", "tensor")
    assert resolve(bound, "params", ("mlp",), (8,)) == P("fsdp")


def test_choices_do_not_depend_on_sizes(devices):
    """Else a matrix with one row of devices would lie whole on all columns."""
    bound = Plan(mesh={"row": 1, "col": 8}, tensor_layout="2d").bind(devices)
    assert resolve(bound, "params", ("embed", "mlp"), (8, 8)) == P(None, "col")
    assert resolve(bound, "params", ("mlp", "embed"), (8, 8)) == P(None, "col")


@pytest.mark.parametrize(("kv_heads", "entry"), [(8, "tensor"), (4, None), (1, None)])
def test_few_kv_heads_are_replicated(devices, kv_heads, entry):
    bound = preset("megatron", mesh={"tensor": 8}).bind(devices)
    assert resolve(bound, "params", ("embed", "kv_heads"), (8, kv_heads)) == P(None, entry)


@pytest.mark.catches("kv-heads-uneven")
@pytest.mark.parametrize("kv_heads", [3, 6, 12])
def test_kv_heads_that_neither_divide_nor_are_divided_are_refused(devices, kv_heads):
    bound = preset("megatron", mesh={"tensor": 8}).bind(devices)
    with pytest.raises(PlanError, match="dim 'kv_heads' has size"):
        resolve(bound, "params", ("embed", "kv_heads"), (8, kv_heads))


def test_refusal_names_parameter_dim_size_axis_and_remedy(devices):
    bound = preset("megatron", mesh={"tensor": 4, "fsdp": 2}).bind(devices)
    infos = {"layers": {"q": info("layers/attn/q/w", ("embed", "heads"), (8, 6))}}
    with pytest.raises(
        PlanError,
        match="layers/attn/q/w: dim 'heads' has size 6, which mesh axis 'tensor' of 4 devices does"
        " not divide; map 'heads' to None or choose a size of 'tensor' that divides 6",
    ):
        validate(bound, infos)


def test_more_stages_than_layers_are_refused(devices):
    bound = Plan(mesh={"stage": 8}).bind(devices)
    few = dataclasses.replace(
        info("layers/q", ("layers", "embed", "heads"), (4, 8, 8)), first_layer=0, total_layers=4
    )
    with pytest.raises(PlanError, match="layers/q: 4 layers are fewer than 8 stages ask for; give"):
        validate(bound, {"q": few})


def test_dims_and_shape_must_agree(devices):
    bound = Plan().bind(devices)
    with pytest.raises(PlanError, match="names 1 dims"):
        resolve(bound, "params", ("embed",), (8, 8), name="x")


def test_a_rule_about_a_misspelt_dim_is_refused(devices):
    rules = Plan().rules.updated(params={"emebd": None})
    with pytest.raises(PlanError, match="no parameter has a dim 'emebd'; did you mean 'embed'"):
        validate(Plan(rules=rules).bind(devices), {"w": info("w", ("embed",), (8,))})


def test_explain_is_a_table_of_layouts_and_bytes(devices):
    bound = preset("zero3+megatron", mesh={"fsdp": 4, "tensor": 2}).bind(devices)
    infos = {"w": info("mlp/up/w", ("embed", "mlp"), (8, 16)), "b": info("b", (None,), (3,))}
    head, names, *rows = explain(bound, infos).splitlines()
    assert head == f"plan {bound.plan.hash} on fsdp=4, tensor=2"
    assert names.split()[0] == "parameter"
    cells = {row.split()[0]: row.split("  ") for row in rows}
    assert [c.strip() for c in cells["mlp/up/w"] if c.strip()] == [
        "mlp/up/w",
        "embed mlp",
        "8 16",
        "fsdp tensor",
        "- tensor",
        "fsdp tensor",
        "fsdp tensor",
        "64",
    ]
    assert cells["b"][-1].strip() == "12"
    assert "whole" in " ".join(cells["b"])


@pytest.mark.catches("ring-must-divide")
@pytest.mark.parametrize(
    ("mesh", "size", "spec", "whole"),
    [
        ({"data": 2, "ring": 3}, 128, P(None), ("ring",)),
        ({"data": 2, "ring": 3}, 129, P("ring"), ()),
        ({"fsdp": 2, "ring": 3}, 128, P("fsdp"), ("ring",)),
        ({"fsdp": 2, "ring": 3}, 12, P(("fsdp", "ring")), ()),
        ({"ring": 3, "ulysses": 2}, 128, P("ulysses"), ("ring",)),
    ],
)
@pytest.mark.parametrize("role", ["params", "gradients", "optimizer"])
def test_an_axis_of_the_sequence_need_not_divide_what_is_stored(
    devices, role, mesh, size, spec, whole
):
    bound = preset("zero3", mesh=mesh).bind(devices[:6])
    assert resolve(bound, role, ("embed",), (size,)) == spec
    assert left_whole(bound, role, ("embed",), (size,)) == whole


@pytest.mark.catches("fsdp-need-not-divide")
def test_other_axes_must_divide_beside_it(devices):
    bound = preset("zero3", mesh={"fsdp": 3, "ring": 2}).bind(devices[:6])
    with pytest.raises(PlanError, match="dim 'embed' has size 128, which mesh axis 'fsdp' of 3"):
        resolve(bound, "params", ("embed",), (128,), name="w")


@pytest.mark.catches("table-uncoloured")
def test_the_table_of_a_notebook_has_the_same_cells_and_a_colour_for_each_layout(devices):
    bound = preset("zero3+megatron", mesh={"fsdp": 4, "tensor": 2}).bind(devices)
    infos = {"w": info("mlp/<up>/w", ("embed", "mlp"), (8, 16)), "b": info("b", (None,), (3,))}
    page = ElementTree.fromstring(explain_html(bound, infos))
    lines = explain(bound, infos).splitlines()
    assert page.find("caption").text == lines[0]
    rows = [[cell.text for cell in row] for row in page.iter("tr")]
    assert rows == [re.split(" {2,}", line) for line in lines[1:]]
    styles = {cell.text: cell.get("style") for cell in page.iter("td")}
    assert styles["whole"] is None and styles["8 16"] is None
    assert "background" in styles["fsdp tensor"] and styles["- tensor"] != styles["fsdp tensor"]


@pytest.mark.catches("group-of-fewest-devices")
@pytest.mark.parametrize(
    ("experts", "asked", "group"),
    [
        (8, None, ("expert", "ring", "tensor")),
        (12, None, ("expert", "ring")),
        (6, None, ("expert",)),
        (7, None, ("expert",)),
        (7, "tensor", ("tensor",)),
        (8, "tensor,expert", ("expert", "tensor")),
        (8, "none", ()),
    ],
)
def test_experts_are_on_the_most_devices_that_divide_them(devices, experts, asked, group):
    plan = Plan(mesh={"expert": 2, "ring": 2, "tensor": 2}, experts=ExpertsConfig(group=asked))
    assert expert_group(plan.bind(devices), experts) == group


def test_experts_that_their_devices_do_not_divide_are_refused(devices):
    bound = Plan(mesh={"expert": 8}).bind(devices)
    with pytest.raises(PlanError, match="dim 'experts' has size 6, which mesh axis 'expert' of 8"):
        resolve(bound, "params", ("experts", "expert_embed", "expert_mlp"), (6, 16, 16), name="up")
