"""Which layers stay on the device, by arithmetic, against a search through all choices."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.errors import PlanError
from colossax.offload import GB, Demand, Kind, Traffic, Way, place, waited_bytes, working_set_bytes
from colossax.offload.budget import check_host_bytes, default_host_bytes, free_host_bytes

GIB = 2**30


MOVED = ((80, 40), (0, 40)), ((0, 80), (0, 80)), ((7, 0), (7, 0))
"""Of a layer's parameters that two passes fetch, and an update; of its state; of what it keeps."""


def demand(layers=4, device=100, host=None, sizes=(40, 80, 7), traffic=MOVED):
    """What a step needs, `host` all that its layers have unless given."""
    kinds = tuple(
        Kind(name=name, layer_bytes=size, layer_traffic=Traffic(*map(Way._make, moved)))
        for name, size, moved in zip(
            ("parameters", "optimizer", "activations"), sizes, traffic, strict=True
        )
    )
    return Demand(
        layers=layers,
        device_bytes=device,
        host_bytes=layers * sum(sizes) if host is None else host,
        kinds=kinds,
    )


def every_residency(need, device_bytes):
    """All of them that the device has room for, one by one."""
    for counts in itertools.product(range(need.layers + 1), repeat=len(need.kinds)):
        placed = need.placed(dict(zip(need.names, counts, strict=True)))
        if placed.device_bytes <= device_bytes:
            yield placed


CASES = st.tuples(
    st.integers(1, 5),
    st.integers(0, 50),
    st.none(),
    st.tuples(st.integers(1, 30), st.integers(1, 60), st.integers(0, 10)),
    st.tuples(*(st.tuples(*2 * [st.tuples(*2 * [st.integers(0, most)])]) for most in (45, 45, 20))),
)


@given(CASES, st.integers(0, 500), st.integers(0, 500))
def test_nothing_else_within_both_budgets_waits_less(case, device_bytes, host_bytes):
    need = demand(*case)
    room = list(every_residency(need, device_bytes))
    fitting = [placed for placed in room if placed.host_bytes <= host_bytes]
    if not fitting:
        with pytest.raises(PlanError, match="GB"):
            place(need, device_bytes=device_bytes, host_bytes=host_bytes)
        return
    found = place(need, device_bytes=device_bytes, host_bytes=host_bytes)
    assert found.device_bytes <= device_bytes and found.host_bytes <= host_bytes
    traffic = case[-1]
    assert waits(found, traffic) == min(waits(placed, traffic) for placed in fitting)


def waits(placed, traffic):
    """What a step waits for, and all that it moves: updates whole, half of what passes move."""
    away = [placed.layers - count for count in placed.resident.values()]
    moved = [
        [sum(n * kind[way][part] for n, kind in zip(away, traffic, strict=True)) for part in (0, 1)]
        for way in (0, 1)
    ]
    return max(passes / 2 + end for passes, end in moved), sum(map(sum, moved))


@pytest.mark.catches("faster-way")
@pytest.mark.catches("updates-beside-matmuls")
def test_a_step_waits_for_the_slower_way_and_hides_no_more_than_compute_lasts():
    traffic = Traffic(Way(100, 10), Way(20, 70))
    assert waited_bytes(traffic) == 80  # to the host: half of 20, and 70
    assert waited_bytes(traffic, hides=15) == 100 + 10 - 15
    assert waited_bytes(traffic, beside=(1.0, 0.0)) == 90


@given(CASES, st.integers(0, 500), st.integers(1, 500))
def test_what_a_refusal_says_would_work_does(case, device_bytes, host_bytes):
    need, scale = demand(*case), GB // 1000  # what is said is rounded up to 0.001 GB
    kinds = [
        Kind(name=k.name, layer_bytes=scale * k.layer_bytes, layer_traffic=k.layer_traffic)
        for k in need.kinds
    ]
    need = Demand(
        layers=need.layers,
        device_bytes=scale * need.device_bytes,
        host_bytes=scale * need.host_bytes,
        kinds=tuple(kinds),
    )
    try:
        place(need, device_bytes=scale * device_bytes, host_bytes=scale * host_bytes)
    except PlanError as refusal:
        words = str(refusal).replace(",", "").replace(";", "").split()
        numbers = [float(a) for a, b in itertools.pairwise(words) if b == "GB"]
        if "plan.offload.host_gb:" in words:
            host = float(words[words.index("host_gb") + 1]) * GB
            device = float(words[words.index("device_gb") + 1]) * GB
            place(need, device_bytes=scale * device_bytes, host_bytes=round(host))
            place(need, device_bytes=round(device), host_bytes=scale * host_bytes)
        else:
            assert round(numbers[1] * GB) == need.device_bytes


def test_parameters_come_first_then_states_of_whole_layers_then_activations():
    need = demand()
    counts = [
        tuple(place(need, device_bytes=100 + room, host_bytes=10**9).resident.values())
        for room in (0, 40, 160, 240, 160 + 4 * 80, 160 + 4 * 80 + 14, 10**6)
    ]
    assert counts == [
        (0, 0, 0),
        (1, 0, 0),
        (4, 0, 0),
        (4, 1, 0),
        (4, 4, 0),
        (4, 4, 2),
        (4, 4, 4),
    ]


def test_room_below_a_layer_of_one_kind_goes_to_the_next():
    found = place(demand(), device_bytes=100 + 39, host_bytes=10**9)
    assert found.resident == {"parameters": 0, "optimizer": 0, "activations": 4}


@pytest.mark.catches("host-budget")
def test_a_small_host_decides_what_leaves_it():
    """Parameters save more traffic, but only states in place of them bring the host under."""
    need = demand(layers=1, host=127)
    free = place(need, device_bytes=100 + 80, host_bytes=127)
    assert free.resident == {"parameters": 1, "optimizer": 0, "activations": 1}
    tight = place(need, device_bytes=100 + 80, host_bytes=47)
    assert tight.resident == {"parameters": 0, "optimizer": 1, "activations": 0}


def test_shares_are_of_what_leaves_the_device():
    found = place(demand(), device_bytes=100 + 40 * 3, host_bytes=10**9)
    assert found.shares == {"parameters": 0.25, "optimizer": 1.0, "activations": 1.0}


def test_a_device_without_room_for_the_working_set_is_refused():
    with pytest.raises(PlanError) as refusal:
        place(demand(device=int(5.2304 * GB)), device_bytes=4 * GB, host_bytes=10**12)
    assert str(refusal.value) == (
        "plan.offload.device_gb: 4.000 GB are given, and a device needs 5.231 GB even with every"
        " layer in host memory; give that much, or make the step smaller: fewer tokens at a time"
        " (plan.batch), or more chunks of the vocabulary (plan.loss.vocab_chunks)"
    )


def test_a_host_without_room_for_the_rest_is_refused():
    need = demand(device=0, sizes=(GB, 2 * GB, 0))
    with pytest.raises(PlanError) as refusal:
        place(need, device_bytes=3 * GB, host_bytes=7 * GB)
    assert str(refusal.value) == (
        "plan.offload.host_gb: 2.000 GB are missing: with 3.000 GB of each device in use, 9.000 GB"
        " for each of them stay in host memory and 7.000 GB are given; give host_gb 9.000, or"
        " device_gb 7.000, or use more devices"
    )


def test_free_memory_is_what_the_system_says(tmp_path):
    source = tmp_path / "meminfo"
    source.write_text("MemTotal: 99 kB\nMemFree:  7 kB\nMemAvailable:   31250 kB\n")
    assert free_host_bytes(source) == 31_250 * 1024
    assert 0 < free_host_bytes() < 2**50
    source.write_text("MemTotal: 99 kB\n")
    for missing in (source, tmp_path / "none"):
        with pytest.raises(PlanError, match=r"does not say how much memory is free; give how much"):
            free_host_bytes(missing)


def test_more_of_the_host_than_is_free_is_refused():
    check_host_bytes(10 * GB, 20 * GB, 2)
    with pytest.raises(PlanError) as refusal:
        check_host_bytes(10 * GB + 1, 20 * GB, 2)
    assert str(refusal.value) == (
        "plan.offload.host_gb: 10.001 GB for each of 2 device(s) of this host, which has 20.000 GB"
        " of free memory; give 10.000 or less, or end what else uses it"
    )


def test_by_default_16_gib_are_left_to_the_system_and_half_of_a_small_host():
    assert default_host_bytes(96 * GIB, 8) == 10 * GIB
    assert default_host_bytes(24 * GIB, 1) == 12 * GIB


def test_the_working_set_is_the_larger_of_two_moments():
    sizes = {"layers": 3, "layer_params": 1000, "largest_matrix": 300, "tokens": 16}
    wide = working_set_bytes(vocab=64, embed=8, vocab_chunks=4, **sizes)
    assert wide == {
        "embedding and head": 24 * 64 * 8,
        "vectors": 12 * 7 * 8,
        "layer": 14_000,
        "new matrix": 3600,
    }
    many = working_set_bytes(vocab=64_000, embed=8, vocab_chunks=1, **sizes)
    assert list(many)[2:] == ["head", "gradient", "logits"]
    assert many["logits"] == 6 * 16 * 64_000


@pytest.mark.catches("container-limit")
def test_a_container_has_less_than_its_host(tmp_path):
    source, group = tmp_path / "meminfo", tmp_path / "group"
    source.write_text("MemAvailable:   31250 kB\n")
    group.mkdir()
    (group / "memory.current").write_text("900\n")
    (group / "memory.stat").write_text("anon 500\ninactive_file 300\nactive_file 100\n")
    (group / "memory.max").write_text("1000\n")
    assert free_host_bytes(source, group) == 1000 - 900 + 300
    (group / "memory.max").write_text("max\n")
    assert free_host_bytes(source, group) == 31_250 * 1024
    (group / "memory.max").write_text("99999999999999\n")
    assert free_host_bytes(source, group) == 31_250 * 1024
    (group / "memory.max").write_text("100\n")
    assert free_host_bytes(source, group) == 0
