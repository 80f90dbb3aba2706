"""The share of the CPU and the tokens that hide traffic, against brute force and by hand."""

import functools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from colossax.offload import (
    Rates,
    UpdateRate,
    cpu_share,
    hiding_tokens,
    kept_token_share,
    update_seconds,
)
from colossax.offload.share import balanced_share

GRID = np.linspace(0, 1, 2001)


def rates(*, cpu=1e9, both=50e9, device=100e9, flops=400e12, platform="gpu", moved=12):
    update = UpdateRate(
        name="adam",
        bytes_per_direction=float(moved),
        cpu_parameters_per_s=cpu,
        device_parameters_per_s=device,
    )
    return Rates(
        device_kind="some",
        platform=platform,
        jax="0",
        to_device_bytes_per_s=both,
        to_host_bytes_per_s=both,
        both_ways_bytes_per_s=both,
        matmul_flops_per_s=flops,
        updates=(update,),
    )


def slowest(x, r, moved):
    """The max() that is to be least, written out."""
    update = r.updates[0]
    return functools.reduce(
        np.maximum,
        (
            x / update.cpu_parameters_per_s,
            ((1 - x) * moved + 2 * x) / r.both_ways_bytes_per_s,
            (1 - x) / update.device_parameters_per_s,
        ),
    )


positive = st.floats(6, 13).map(lambda power: 10**power)


@given(cpu=positive, both=positive, device=positive, moved=st.sampled_from([1, 2, 4, 8, 12, 16]))
@example(cpu=1e12, both=885351255690.1405, device=17900165.455431946, moved=2)  # a share near 1
def test_no_share_of_a_grid_is_better(cpu, both, device, moved):
    r = rates(cpu=cpu, both=both, device=device, moved=moved)
    share = balanced_share(r, moved)
    assert 0 <= share <= 1
    least = slowest(GRID, r, moved).min()
    steepest = max(1 / cpu, abs(moved - 2) / both, 1 / device)
    rounding = 1e-12 * least + 4 * np.finfo(float).eps * steepest  # of the sum and of the share
    assert slowest(share, r, moved) <= least + rounding
    for x in (0.0, share, 1.0):
        assert update_seconds(x, r, moved, 3.0) == pytest.approx(3 * slowest(x, r, moved))


@given(cpu=positive, both=positive, device=positive, moved=st.sampled_from([4, 8, 10, 12, 14]))
def test_a_share_is_taken_where_it_pays_and_only_there(cpu, both, device, moved):
    r = rates(cpu=cpu, both=both, device=device, moved=moved)
    share = cpu_share(r, moved)
    gain = 1 - slowest(balanced_share(r, moved), r, moved) / slowest(0.0, r, moved)
    pays = cpu * moved / both > 0.2 and gain > 0.1
    assert share == (balanced_share(r, moved) if pays else 0.0)


@pytest.mark.catches("balance-gradient-bytes")
def test_the_balance_of_cpu_and_traffic_in_closed_form():
    """f of the device = (1/U - 2/B) / (1/U + (s - 2)/B): 0.8, and 17 % less time."""
    share = cpu_share(rates(), 12)
    assert share == pytest.approx(0.2)
    assert update_seconds(share, rates(), 12, 1e9) == pytest.approx(0.2)
    assert update_seconds(0.0, rates(), 12, 1e9) == pytest.approx(0.24)


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({"cpu": 0.16e9}, 12),  # updates too few
        ({"cpu": 0.75e9}, 12),  # 0.18 of the traffic
        ({"cpu": 3e9, "moved": 4}, 2),  # what it would save it would send
        ({"cpu": 3e9, "platform": "cpu"}, 12),  # the same cores
    ],
)
def test_where_it_does_not_pay_the_share_is_zero(given, moved):
    assert cpu_share(rates(**given), moved) == 0.0


def test_the_nearest_measured_update_counts():
    r = rates()
    slow = UpdateRate(
        name="low", bytes_per_direction=8.0, cpu_parameters_per_s=1e8, device_parameters_per_s=1e11
    )
    r = Rates(**{**vars(r), "updates": (*r.updates, slow)})
    assert cpu_share(r, 14) > 0
    assert cpu_share(r, 9) == 0.0


sizes = st.integers(0, 10**12)
amounts = {
    "bytes_per_s": st.integers(1, 10**12),
    "layer_s": st.integers(0, 10),
    "fixed_bytes": sizes,
    "mlp_bytes": st.integers(1, 10**12),
    "host_bytes": sizes,
}


@given(st.fixed_dictionaries(amounts))
def test_as_many_tokens_are_kept_as_travel_and_fit(given):
    """In exact numbers: one token more would do neither, unless it is all or none."""
    share = Fraction(kept_token_share(**given))
    assert 0 <= share <= 1
    room = min(given["bytes_per_s"] * given["layer_s"], given["host_bytes"])
    wanted = given["fixed_bytes"] + share * given["mlp_bytes"]
    close = Fraction(given["mlp_bytes"], 2**50)
    if share > 0:
        assert wanted <= room + close
    else:
        assert given["fixed_bytes"] >= room - close
    if share < 1:
        assert wanted >= room - close


@given(st.fixed_dictionaries(amounts), st.sampled_from(sorted(amounts)), st.integers(2, 100))
def test_the_share_of_the_tokens_goes_with_what_allows_it(given, name, factor):
    more = kept_token_share(**{**given, name: factor * given[name]})
    now = kept_token_share(**given)
    assert more >= now if name in ("bytes_per_s", "layer_s", "host_bytes") else more <= now


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.5),  # 100 bytes travel: 40 are fixed, 60 of 120
        ({"mlp_bytes": 60}, 1.0),
        ({"mlp_bytes": 10}, 1.0),
        ({"fixed_bytes": 100}, 0.0),
        ({"fixed_bytes": 400}, 0.0),  # not even what is fixed travels in that time
        ({"host_bytes": 70}, 0.25),
        ({"host_bytes": 0}, 0.0),
        ({"host_bytes": 1e18}, 0.5),
        ({"layer_s": 0}, 0.0),
    ],
)
def test_the_share_of_the_tokens_in_closed_form(settings, expected):
    given = {"bytes_per_s": 50, "layer_s": 2, "fixed_bytes": 40, "mlp_bytes": 120, **settings}
    assert kept_token_share(**given) == expected


@pytest.mark.parametrize(
    ("both", "moved", "expected"), [(50e9, 14, 14000), (34e9, 14, 20588), (50e9, 4, 4000)]
)
def test_tokens_that_hide_the_traffic(both, moved, expected):
    r = rates(both=both)
    assert hiding_tokens(r, moved) == pytest.approx(expected, rel=1e-4)
    assert hiding_tokens(r, moved, host_share=0.25) == pytest.approx(expected / 4, rel=1e-4)
    assert hiding_tokens(r, moved, flops_per_parameter=6) == pytest.approx(
        expected * 8 / 6, rel=1e-4
    )
