"""Where a layer's arrays live: text both ways, refusals, and plans as they were written before."""

import dataclasses
import itertools
import json

import jaxtyping
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.config import HOST_KINDS, Placement, Plan, Segment
from colossax.config.placement import NAMED_ACTIVATIONS, NAMES
from colossax.errors import PlanError


def subsets(names):
    return [
        chosen for size in range(len(names) + 1) for chosen in itertools.combinations(names, size)
    ]


def go_together(names):
    """Whether a text may name these."""
    on_disk = "disk" in names
    if on_disk and "optimizer" not in names:
        return False
    return "cpu" not in names or ({"parameters", "optimizer"} <= set(names) and not on_disk)


TEXTS = ["+".join(names) or "none" for names in subsets(NAMES) if go_together(names)]
REFUSED = ["+".join(names) for names in subsets(NAMES) if not go_together(names)]


def every_placement():
    for params, optimizer, experts, activations, named, cpu in itertools.product(
        ("device", "host"),
        ("device", "host", "disk"),
        ("device", "host"),
        ("device", "host"),
        map(frozenset, subsets(NAMED_ACTIVATIONS)),
        (False, True),
    ):
        if not cpu or params == optimizer == "host":
            yield Placement(
                params=params,
                optimizer=optimizer,
                experts=experts,
                activations=activations,
                named_activations=named,
                updated_by_cpu=cpu,
            )


@pytest.mark.catches("placement-text-without-disk")
def test_every_placement_reads_the_text_it_writes():
    placements = list(every_placement())
    texts = [str(placement) for placement in placements]
    assert [Placement.from_text(text) for text in texts] == placements
    assert sorted(texts) == sorted(TEXTS), "each has a text of its own, and there are no others"


@given(st.sampled_from(TEXTS), st.randoms())
def test_the_order_of_names_does_not_matter(text, random):
    names = text.split("+") * 2
    random.shuffle(names)
    given_ = "none" if text == "none" else "+".join(names)
    assert Placement.from_text(given_) == Placement.from_text(text)


@pytest.mark.catches("cpu-updates-what-is-on-disk")
def test_all_other_texts_are_refused():
    for text in REFUSED:
        with pytest.raises(PlanError, match="says where the optim|what is not in its memory"):
            Placement.from_text(text)


def test_one_more_name_is_the_text_with_it():
    for text, name in itertools.product(TEXTS, NAMES):
        placement = Placement.from_text(text)
        names = {*placement.names, name}
        if go_together(names):
            assert placement.with_name(name) == Placement.from_text("+".join(names))
        else:
            with pytest.raises(PlanError):
                placement.with_name(name)
    on_disk = Placement(optimizer="disk")
    assert on_disk.with_name("optimizer") == on_disk


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weights", "segments.offload: unknown 'weights'; known: activations, attention, cpu, "),
        ("paramters", "segments.offload: unknown 'paramters'; did you mean 'parameters'?"),
        ("none+mlp", "segments.offload: unknown 'none'"),
        ("", "segments.offload: unknown ''"),
        (
            "parameters+disk",
            "segments.offload: 'disk' says where the optimizer's state lies that is not on the"
            " device; write optimizer+disk",
        ),
        *(
            (
                text,
                f"segments.offload: '{text}' lets the CPU update what is not in its memory; write"
                " parameters+optimizer+cpu",
            )
            for text in ("cpu", "parameters+cpu", "optimizer+cpu", "parameters+optimizer+disk+cpu")
        ),
    ],
)
def test_texts_are_refused_in_one_sentence(text, message):
    for make in (Placement.from_text, lambda text: Segment(offload=text)):
        with pytest.raises(PlanError) as caught:
            make(text)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params": "disk"}, "placement.params: unknown 'disk'; known: device, host"),
        ({"params": None}, "placement.params: expected str, found None; give a text"),
        ({"optimizer": "hots"}, "placement.optimizer: unknown 'hots'; did you mean 'host'?"),
        ({"activations": "disk"}, "placement.activations: unknown 'disk'; known: device, host"),
        ({"activations": "mlp"}, "placement.activations: unknown 'mlp'; known: device, host"),
        (
            {"named_activations": "mlp"},
            "placement.named_activations: found 'mlp'; give a frozenset of names, of input, qkv,",
        ),
        (
            {"named_activations": frozenset({"mlps"})},
            "placement.named_activations: unknown 'mlps'; did you mean 'mlp'?",
        ),
        (
            {"updated_by_cpu": 1},
            "placement.updated_by_cpu: expected bool, found 1; give true or false",
        ),
        (
            {"updated_by_cpu": True, "params": "host"},
            "segments.offload: 'parameters+cpu' lets the CPU update what is not in its memory",
        ),
    ],
)
def test_fields_are_refused_in_one_sentence(fields, message, monkeypatch):
    # As in a user's program, where annotations are not enforced.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(PlanError) as caught:
        Placement(**fields)
    assert str(caught.value).startswith(message)


def test_what_a_placement_says_of_itself():
    for placement in every_placement():
        names = str(placement).split("+")
        assert placement.all_on_device == (names == ["none"])
        assert placement.kinds == tuple(kind for kind in HOST_KINDS if kind in names)
        assert placement.params_on_host == ("parameters" in names)
        assert placement.optimizer_off_device == ("optimizer" in names)
        assert placement.optimizer_on_disk == ("disk" in names)
        assert placement.activations_on_host == ("activations" in names)
        assert placement.input_on_host == bool({"activations", "input"} & set(names))
        assert placement.saved_on_host == {"qkv", "attention", "mlp"} & set(names)
        reachable = {"parameters", "optimizer"} <= set(names) and "disk" not in names
        assert placement.cpu_can_update == reachable


WRITTEN = {
    ("parameters+optimizer+cpu", "none"): "0f2aa0af204aa8e8",
    ("disk+optimizer+parameters", "full"): "a331c7ee88e2fc85",
    ("input+mlp", "full"): "fb9dc97e434f4c2f",
    ("mlp+activations", "attention"): "4b35256d05696561",
    ("optimizer+optimizer", "none"): "7a5f9818e480877c",
    ("none", "none"): "44136fa355b3678a",
}
"""Hashes that plans had when segments held text alone, by a segment's `offload` and `remat`."""


@pytest.mark.catches("segment-rewrites-its-offload")
@pytest.mark.parametrize(("offload", "remat"), WRITTEN)
def test_plans_are_read_and_written_as_ever(offload, remat):
    segment = {"count": -1, "mlp_share": 1.0, "offload": offload, "remat": remat}
    plan = Plan.from_json(json.dumps({"version": 1, "segments": [segment]}))
    assert json.loads(plan.to_json())["segments"] == [segment]
    assert plan.hash == WRITTEN[offload, remat]
    assert Plan.from_json(plan.to_json()) == plan


def test_a_segment_that_is_changed_has_another_placement():
    segment = Segment(offload="optimizer+parameters")
    assert segment.placement == Placement(params="host", optimizer="host")
    assert dataclasses.replace(segment, count=3).placement == segment.placement
    moved = dataclasses.replace(segment, offload=str(segment.placement.with_name("disk")))
    assert moved.placement == Placement(params="host", optimizer="disk")
    asked = Segment(offload="optimizer+parameters")  # its placement has never been looked at
    assert segment == asked and hash(segment) == hash(asked)
