"""Shares of layers become runs of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.config import HOST_KINDS, OffloadConfig, Plan, Segment
from colossax.errors import PlanError
from colossax.offload import resolved_segments, segment_counts

_SHARES = st.fixed_dictionaries(
    {kind: st.sampled_from([0.0, 0.1, 0.25, 0.5, 2 / 3, 0.9, 1.0]) for kind in HOST_KINDS}
)
_COUNTS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def by_layer(segments):
    """(remat, names of what is away) of each layer."""
    return [(s.remat, set(s.placement.names)) for s in segments for _ in range(s.count)]


@given(_SHARES, _COUNTS, st.integers(0, 3))
def test_each_kind_is_in_host_memory_from_the_first_layer_on(shares, counts, explicit):
    remats = ["none", "full", "dots", "attention"]
    own = [Segment(count=c, remat=r) for c, r in zip(counts, remats, strict=False)]
    if explicit < len(own):
        own[explicit] = Segment(count=counts[explicit], remat="full", offload="mlp")
    plan = Plan(segments=tuple(own), offload=OffloadConfig(**shares))
    total = sum(counts)
    found = resolved_segments(plan, total)
    assert all(segment.count >= 1 for segment in found)
    layers, given_ = by_layer(found), by_layer(own)
    assert len(layers) == total
    for number, ((remat, host), (wanted, before)) in enumerate(zip(layers, given_, strict=True)):
        assert remat == wanted
        there = {k for k, share in shares.items() if number < math.ceil(share * total - 1e-6)}
        assert host == before | there
    # No more runs than begin where a segment or a share does.
    assert len(found) <= len(own) + len(HOST_KINDS)


def test_no_shares_leave_the_segments_as_they_are():
    plan = Plan(segments=(Segment(count=2), Segment(remat="full")))
    assert resolved_segments(plan, 5) == (Segment(count=2), Segment(count=3, remat="full"))


@pytest.mark.catches("share-of-last-layers")
def test_shares_cut_a_segment():
    plan = Plan(offload=OffloadConfig(parameters=0.25, optimizer=0.5))
    assert resolved_segments(plan, 8) == (
        Segment(count=2, offload="parameters+optimizer"),
        Segment(count=2, offload="optimizer"),
        Segment(count=4),
    )


@pytest.mark.parametrize(
    ("share", "layers", "wanted"), [(0.45, 40, 18), (1 / 3, 3, 1), (0.1, 3, 1)]
)
def test_a_share_is_rounded_up_to_whole_layers(share, layers, wanted):
    assert OffloadConfig(parameters=share).layers("parameters", layers) == wanted


@pytest.mark.parametrize("counts", [(3, 4), (9,), (-1, 8)])
def test_counts_that_do_not_cover_the_layers_are_refused(counts):
    with pytest.raises(PlanError, match="do not cover 8 layers"):
        segment_counts(tuple(Segment(count=count) for count in counts), 8)


def test_shares_that_are_still_to_be_found_are_refused():
    with pytest.raises(PlanError, match="the shares are not known yet"):
        resolved_segments(Plan(offload=OffloadConfig(auto=True)), 4)
