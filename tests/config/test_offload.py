"""Settings of host memory: text, JSON, hash, refusals."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.config import HOST_KINDS, PIPELINED_OPTION, OffloadConfig, Plan, Segment
from colossax.config.offload import CLIPPING
from colossax.errors import PlanError

_SHARES = st.floats(0, 1, allow_nan=False)


@given(
    st.fixed_dictionaries(dict.fromkeys(HOST_KINDS, _SHARES)),
    st.sampled_from(CLIPPING),
)
def test_a_plan_round_trips_through_json(shares, clipping):
    offload = OffloadConfig(**shares, clipping=clipping, host_gb=12.5)
    found_later = Segment(remat="full", offload="mlp+optimizer", mlp_share="auto")
    plan = Plan(offload=offload, segments=(found_later,))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert plan.hash != Plan().hash


def test_a_plan_without_offload_has_the_hash_it_had():
    """Checkpoints and caches of plans from before know it by this."""
    assert Plan().hash == "44136fa355b3678a"
    assert Plan(offload=OffloadConfig()).hash == Plan().hash


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("auto", OffloadConfig(auto=True, clipping="two_pass")),
        ("none", OffloadConfig(clipping="two_pass")),
        ("parameters=1", OffloadConfig(parameters=1.0, clipping="two_pass")),
        (
            "optimizer=1,activations=0.5",
            OffloadConfig(optimizer=1.0, activations=0.5, clipping="two_pass"),
        ),
    ],
)
def test_text_replaces_the_shares_and_nothing_else(text, wanted):
    given_ = OffloadConfig(parameters=0.5, clipping="two_pass")
    assert given_.with_text(text) == wanted


@pytest.mark.parametrize("text", ["none", "parameters=0.5"])
def test_text_in_place_of_auto_replaces_its_budgets_too(text):
    auto = OffloadConfig(auto=True, device_gb=8.0, host_gb=16.0)
    assert auto.with_text(text) == OffloadConfig().with_text(text)
    assert auto.with_text("auto") == auto


def test_none_leaves_an_ordinary_step():
    found = OffloadConfig(fused=True, parameters=1.0, optimizer=1.0, cpu_update=0.5)
    assert found.with_text("none") == OffloadConfig()
    assert found.with_text("parameters=1,optimizer=1") == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all", "found 'all'; write auto, none, or shares"),
        ("params=1", "found 'params=1'; write auto, none, or shares"),
        ("parameters=half", "offload.parameters: found 'half'; give the share"),
        ("parameters=2", "offload.parameters: found 2.0; give the share of the layers, 0 to 1"),
    ],
)
def test_text_that_says_something_else_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        OffloadConfig().with_text(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": -0.1}, "offload.optimizer: found -0.1"),
        ({"activations": 1.5}, "offload.activations: found 1.5"),
        ({"parameters": float("nan")}, "offload.parameters: found nan"),
        ({"device_gb": 0.0}, "offload.device_gb: found 0.0; give gigabytes above 0"),
        ({"host_gb": float("inf")}, "offload.host_gb: found inf"),
        ({"clipping": "stacks"}, "clipping: unknown 'stacks'; did you mean 'stack'"),
        ({"pipelined": "yes"}, "offload.pipelined: unknown 'yes'; known: auto, off"),
        ({"auto": True, "optimizer": 1.0}, "'auto' finds the shares, and some are given as well"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(PlanError, match=message):
        OffloadConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload": "weights"}, "segments.offload: unknown 'weights'"),
        ({"offload": "paramters"}, "unknown 'paramters'; did you mean 'parameters'"),
        ({"offload": "mlp"}, "'mlp' is kept by name, and remat 'none' keeps more than names"),
        ({"mlp_share": -0.1}, "mlp_share: found -0.1; give a share of the tokens, 0 to 1, or auto"),
        ({"mlp_share": 1.1}, "mlp_share: found 1.1"),
        ({"mlp_share": True}, "mlp_share: found True"),
        ({"mlp_share": "half"}, "mlp_share: found 'half'"),
        ({"mlp_share": 0.5, "remat": "full"}, "neither remat nor offload names it"),
        ({"mlp_share": "auto"}, "offload 'none' does not name it; add 'mlp' there, or give a num"),
        (
            {"mlp_share": "auto", "remat": "mlp", "offload": "activations"},
            "offload 'activations' does not name it",
        ),
    ],
)
def test_segments_that_cannot_be_are_refused(settings, message):
    with pytest.raises(PlanError, match=message):
        Segment(**settings)


def test_who_sets_the_compilers_option_decides_on_it_alone():
    options = {PIPELINED_OPTION: False}
    with pytest.raises(PlanError, match="pipelined 'auto' decides on it; drop one of them"):
        Plan(offload=OffloadConfig(pipelined="auto"), compiler_options=options)
    assert dict(Plan(compiler_options=options).compiler_options) == options


def test_pipelined_survives_json_and_off_does_not_change_the_hash():
    plan = Plan(offload=OffloadConfig(pipelined="auto"))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.hash != Plan().hash == Plan(offload=OffloadConfig(pipelined="off")).hash


@pytest.mark.parametrize("share", ["auto", 0.25, 0.0, 1])
def test_the_share_of_the_tokens_survives_json(share):
    plan = Plan(segments=(Segment(remat="full", offload="mlp", mlp_share=share),))
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.hash == plan.hash
    found = again.segments[0].mlp_share
    assert found == share and type(found) is (str if share == "auto" else float)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [({}, False), ({"auto": True}, True), ({"fused": True}, True), ({"activations": 0.1}, True)],
)
def test_layers_are_updated_during_backward_where_anything_asks_for_it(settings, wanted):
    assert OffloadConfig(**settings).wanted == wanted


def test_a_budget_that_nothing_keeps_within_is_refused():
    found_later = (Segment(remat="full", offload="mlp", mlp_share="auto"),)
    for field in ("device_gb", "host_gb"):
        budget = OffloadConfig(parameters=1.0, **{field: 8.0})
        with pytest.raises(
            PlanError, match=rf"offload\.{field}: found 8, and only plan\.offload a"
        ):
            Plan(offload=budget).check_budgets()
        Plan(offload=budget.settled).check_budgets()
        Plan(offload=dataclasses.replace(budget, auto=True, parameters=0.0)).check_budgets()
    Plan(offload=OffloadConfig(host_gb=8.0), segments=found_later).check_budgets()
    with pytest.raises(PlanError, match=r"offload\.device_gb: found 8"):
        Plan(offload=OffloadConfig(device_gb=8.0), segments=found_later).check_budgets()


def test_shares_found_within_a_budget_stand_without_it():
    auto = OffloadConfig(auto=True, device_gb=8.0, host_gb=16.0, clipping="layer")
    plan = Plan(offload=auto).placed({"parameters": 0.5})
    assert plan == Plan(offload=OffloadConfig(parameters=0.5, clipping="layer"))
    found_later = (Segment(remat="full", offload="mlp", mlp_share="auto"),)
    plan = Plan(offload=auto, segments=found_later).placed({"parameters": 0.5})
    assert (plan.offload.device_gb, plan.offload.host_gb) == (None, 16.0)
