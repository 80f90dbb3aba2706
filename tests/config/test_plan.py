"""The Plan: JSON, hash, presets, refusals."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.config import (
    MESH_AXES,
    PRESETS,
    AttentionConfig,
    BatchConfig,
    ExpertsConfig,
    FrozenDict,
    LossConfig,
    OffloadConfig,
    PipelineConfig,
    Plan,
    Precision,
    Segment,
    bind,
    preset,
)
from colossax.errors import PlanError


@pytest.mark.parametrize("name", [*PRESETS, "zero3+megatron_sp", "ddp+megatron", "zero1+megatron"])
def test_json_round_trip_keeps_value_and_hash(name):
    plan = preset(name, batch=BatchConfig(accumulation=2), precision=Precision(compute="bfloat16"))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert hash(again) == hash(plan)


def test_hash_covers_only_what_differs_from_defaults():
    assert Plan().hash == Plan(batch=BatchConfig(accumulation=1)).hash
    assert Plan().hash != Plan(batch=BatchConfig(accumulation=2)).hash
    assert Plan(mesh={"fsdp": 2, "tensor": 4}).hash == Plan(mesh={"tensor": 4, "fsdp": 2}).hash


OTHER = {
    "mesh": {"tensor": 2},
    "rules": preset("ddp").rules,
    "tensor_layout": "2d",
    "tensor_matmul": "overlap",
    "attention": AttentionConfig(kernel="xla"),
    "batch": BatchConfig(accumulation=2),
    "pipeline": PipelineConfig(chunks=2),
    "experts": ExpertsConfig(dispatch="gather"),
    "segments": (Segment(remat="full"),),
    "precision": Precision(compute="bfloat16"),
    "loss": LossConfig(vocab_chunks=2),
    "offload": OffloadConfig(fused=True),
    "compiler_options": {"xla_gpu_graph_level": 0},
}
"""Another value of every field; `version` has one alone."""


@pytest.mark.catches("plan-hash-forgets-a-field")
def test_every_field_changes_the_hash():
    fields = {field.name for field in dataclasses.fields(Plan)}
    assert set(OTHER) == fields - {"version"}
    plans = [Plan(), *(Plan(**{name: value}) for name, value in OTHER.items())]
    assert len({plan.hash for plan in plans}) == len(plans)
    assert len({hash(plan) for plan in plans}) == len(plans)


PARTS = [
    AttentionConfig(kernel="xla"),
    AttentionConfig(scheme="ring"),
    BatchConfig(microbatch=2),
    BatchConfig(reduce_once=True),
    Precision(params="bfloat16"),
    Precision(reduction="bfloat16"),
    Precision(accumulation="bfloat16"),
    Precision(cache="bfloat16"),
    PipelineConfig(schedule="gpipe"),
    PipelineConfig(microbatches=2),
    PipelineConfig(table="own.json"),
    ExpertsConfig(group="tensor,expert"),
    ExpertsConfig(group="none"),
    ExpertsConfig(capacity=2.0),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_every_field_of_a_part_changes_the_hash(part):
    name = type(part).__name__.removesuffix("Config").lower()
    plan = Plan(**{name: part})
    assert plan.hash != Plan().hash
    assert Plan.from_json(plan.to_json()) == plan


def test_json_keys_are_sorted_and_missing_fields_take_their_default():
    keys = list(json.loads(Plan().to_json()))
    assert keys == sorted(keys)
    assert Plan.from_json('{"mesh": {"tensor": 2}}') == Plan(mesh={"tensor": 2})


@pytest.mark.catches("plan-version")
@pytest.mark.catches("axis-of-no-text")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan: not JSON"),
        ("[]", "plan: expected an object"),
        ('{"attn": 1}', "unknown field 'attn'; did you mean 'attention'"),
        ('{"batch": {"acumulation": 2}}', "plan.batch: unknown field 'acumulation'"),
        ('{"batch": {"accumulation": "x"}}', "plan.batch.accumulation: expected int, found 'x'"),
        ('{"mesh": {"tensr": 2}}', "no axis is called 'tensr'; did you mean 'tensor'"),
        ('{"mesh": {"tensor": 0}}', "axis 'tensor' has size 0"),
        ('{"experts": {"dispatch": "passs"}}', "unknown 'passs'; did you mean 'passes'"),
        ('{"experts": {"group": "expert,fsdp"}}', "cannot be split over 'fsdp'"),
        ('{"experts": {"group": "tensor,tensor"}}', "name each axis once"),
        ('{"experts": {"group": "expert", "dispatch": "weights"}}', "leave one of the two out"),
        ('{"experts": {"capacity": 0}}', "experts.capacity"),
        ('{"pipeline": {"schedule": "1f1v"}}', "unknown '1f1v'; did you mean '1f1b'"),
        ('{"pipeline": {"microbatches": 0}}', "found 0; give 1 or more microbatches"),
        (
            '{"pipeline": {"schedule": "1f1b", "table": "own.json"}}',
            "both schedule '1f1b' and table 'own.json' are given; leave one of them out",
        ),
        ('{"mesh": {"data": -1, "fsdp": -1}}', "several axes are -1"),
        ('{"rules": {"params": {"embed": "fdsp"}}}', "no mesh axis is called 'fdsp'"),
        ('{"rules": {"params": {"embed": [[1.5]]}}}', "no mesh axis is called '1.5'"),
        ('{"segments": [{"remat": "ful"}]}', "unknown policy 'ful'"),
        ('{"segments": [{"remat": "qkv+full"}]}', "unknown policy 'full'"),
        ('{"precision": {"compute": "bf16"}}', "unknown 'bf16'"),
        ('{"attention": {"kernel": "flash"}}', "unknown 'flash'"),
        ('{"version": 2}', "this library reads version 1"),
    ],
)
def test_bad_plans_are_refused_in_one_sentence(text, message):
    with pytest.raises(PlanError, match=message) as caught:
        Plan.from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("zero4", "did you mean 'zero3'"), ("ddp+zero3", "names two of one kind")],
)
def test_unknown_presets_are_refused(name, message):
    with pytest.raises(PlanError, match=message):
        preset(name)


def test_preset_applies_first_then_overrides():
    assert dict(preset("zero3").mesh) == {"fsdp": -1}
    assert dict(preset("zero3", mesh={"fsdp": 2, "tensor": 4}).mesh) == {"fsdp": 2, "tensor": 4}


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3), st.integers(0, 2))
def test_one_axis_takes_the_remaining_devices(sizes, open_axis):
    devices = sizes[0] * sizes[1] * sizes[2]
    mesh = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
    wanted = {axis: mesh.get(axis, 1) for axis in MESH_AXES}
    assert Plan(mesh=mesh).mesh_sizes(devices) == wanted
    mesh[list(mesh)[open_axis]] = -1
    assert Plan(mesh=mesh).mesh_sizes(devices) == wanted


def test_no_mesh_gives_all_devices_to_fsdp():
    assert Plan().mesh_sizes(8)["fsdp"] == 8


@pytest.mark.parametrize("mesh", [{"fsdp": 3}, {"fsdp": 4, "tensor": 4}, {"fsdp": -1, "tensor": 3}])
def test_a_mesh_that_is_not_the_device_count_is_refused(mesh):
    with pytest.raises(PlanError, match=r"multiply to \d+, but there are 8 devices"):
        Plan(mesh=mesh).bind(jax.devices())


def test_binding_has_every_axis_and_several_live_side_by_side(devices):
    whole = bind(Plan(mesh={"fsdp": 4, "tensor": 2}), devices)
    half = Plan(mesh={"data": 4}).bind(devices[4:])
    assert whole.mesh.axis_names == MESH_AXES
    assert whole.mesh.shape["fsdp"] == 4
    assert whole.mesh.shape["ring"] == 1
    assert {d.id for d in half.mesh.devices.flat} == {4, 5, 6, 7}
    assert whole.size(("fsdp", "tensor")) == 8


@pytest.mark.catches("mesh-order")
def test_innermost_axis_gets_neighbouring_devices(devices):
    mesh = bind(Plan(mesh={"fsdp": 4, "tensor": 2}), devices).mesh
    rows = mesh.devices.reshape(4, 2)
    assert [d.id for d in rows[0]] == [0, 1]


def test_frozen_dict_hashes_like_it_compares():
    one, two = FrozenDict({"a": 1, "b": 2}), FrozenDict({"b": 2, "a": 1})
    assert one == two
    assert hash(one) == hash(two)
    assert one.updated({"a": 3}) == {"a": 3, "b": 2}


def test_segments_need_a_count():
    with pytest.raises(PlanError, match="at most one segment may have count -1"):
        Plan(segments=(Segment(), Segment()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Plan(precision="bfloat16"),
            "plan.precision: expected Precision, found 'bfloat16'",
        ),
        (lambda: Plan(segments=(4,)), "plan.segments.0.: expected Segment, found 4"),
        (lambda: Plan(segments=Segment()), "plan.segments: found Segment"),
        (lambda: BatchConfig(accumulation=2.5), "batch.accumulation: expected int, found 2.5"),
        (lambda: Segment(remat=None), "segments.remat: expected str, found None"),
        (lambda: Precision(compute=5), "precision.compute: unknown '5'"),
        (lambda: Precision(compute="float64"), "unknown 'float64'"),
        (lambda: Precision(compute=np.int32), "unknown 'int32'"),
    ],
)
def test_a_plan_made_in_python_is_checked_like_json(make, message, monkeypatch):
    # As in a user's program, where annotations are not enforced.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(PlanError, match=message):
        make()


def test_a_precision_takes_dtypes():
    assert Precision(compute=jnp.bfloat16, params=np.float32) == Precision(compute="bfloat16")
