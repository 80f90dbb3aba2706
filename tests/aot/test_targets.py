"""Targets: what can be named, what is refused, which link an axis crosses."""

import json
from importlib import resources

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from colossax.aot import gpu_keys, hops, parse_target
from colossax.errors import InputError


@pytest.mark.parametrize("key", ["a100_40", "a100_80", "h100", "h200", "b200"])
def test_every_gpu_is_there_with_its_sources(key):
    target = parse_target(f"{key}:2x8")
    assert key in gpu_keys()
    assert (target.size, target.name) == (16, f"{key}:2x8")
    assert 40e9 < target.gpu.memory_bytes < 200e9
    fields = json.loads(resources.files("colossax.aot").joinpath("targets.json").read_text())
    assert all(fields["gpus"][key]["sources"])
    for link in (*fields["nvlinks"].values(), *fields["networks"].values()):
        assert link["source"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "write GPU:NODESxGPUS, such as h100:1x8"),
        ("h10:1x8", "no GPU is called 'h10'; did you mean 'h100'"),
        ("h100:200x8", "found 1600 devices; choose 1 to 1024"),
        ("h100:0x8", "found 0 devices"),
        ("h100:1x8@wifi", "no network is called 'wifi'"),
        ("h100:1x8@", "behind it @NETWORK, where --network is not meant"),
        ("h100:1x8+", "island '': write GPU:NODESxGPUS, such as h100:1x8"),
        ("h100:1x8@ib+a100x8", "island 'a100x8': write GPU:NODESxGPUS"),
        ("h100:1x8+b20:1x8", "no GPU is called 'b20'; did you mean 'b200'"),
        ("h100:64x8+h200:65x8", "found 1032 devices; choose 1 to 1024"),
        ("h100:1x8+h200:0x8", "found 0 devices in island 'h200:0x8'"),
    ],
)
def test_what_is_no_target_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse_target(text)


def test_an_unknown_network_is_refused():
    for option in ("network", "between"):
        with pytest.raises(InputError, match=f"^--{option}: no network is called 'infiniband'"):
            parse_target("h100:1x8", **{option: "infiniband"})


def mesh(**sizes):
    device = jax.devices()[0]
    grid = np.full(tuple(sizes.values()), device, dtype=object)
    return Mesh(grid, tuple(sizes))


@pytest.mark.catches("network-crossed")
def test_an_axis_crosses_the_network_where_its_devices_do():
    target = parse_target("h100:4x2")
    grid = mesh(data=2, fsdp=2, tensor=2)
    assert target.link(grid, ["tensor"]).name == "nvlink4"
    assert target.link(grid, ["fsdp"]).name == "ib"
    assert target.link(grid, ["data"]).name == "ib"
    assert target.link(grid, ["fsdp", "tensor"]).name == "ib"
    assert parse_target("h100:1x8").link(grid, ["data"]).name == "nvlink4"


def test_islands_with_networks_of_their_own():
    target = parse_target("h100:2x8@ib+a100:2x4@roce+h200:1x2", network="ethernet")
    assert target.name == "h100:2x8@ib+a100_80:2x4@roce+h200:1x2"
    assert parse_target(target.name, network="ethernet") == target
    assert (target.size, target.mixed) == (26, True)
    assert [i.network.name for i in target.islands] == ["ib", "roce", "ethernet"]
    assert target.between.name == "ethernet"
    assert parse_target("h100:1x8+h100:1x8", between="ib").between.name == "ib"
    assert [one.gpu.key for one in target.apart] == ["h100", "a100_80", "h200"]
    with pytest.raises(InputError, match="what is asked for is of one; give one of them"):
        assert target.gpu
    with pytest.raises(InputError, match="no network is called 'wifi'"):
        parse_target("h100:1x8", between="wifi")


def test_a_network_behind_the_gpus_overrules_the_option():
    target = parse_target("h100:2x8@roce", network="ethernet")
    assert (target.network.name, target.name) == ("roce", "h100:2x8@roce")
    assert parse_target("h100:2x8", network="ethernet").network.name == "ethernet"


@pytest.mark.catches("island-link")
def test_links_within_and_between_islands():
    target = parse_target("h100:2x4@ib+a100:1x8@roce")
    grid = mesh(stage=4, fsdp=2, tensor=2)
    assert target.link(grid, ["tensor"]).name == "nvlink3"
    assert target.link(grid, ["fsdp", "tensor"]).name == "nvlink3"
    assert target.link(grid, ["stage"]).name == "ethernet"
    assert target.link(grid, []).name == "ethernet"
    first_two, last_two = mesh(data=2, tensor=4), mesh(data=8)
    assert target.link(first_two, ["tensor"]).name == "nvlink4"
    assert target.link(first_two, ["data"]).name == "ib"
    assert target.link(last_two, ["data"], first=8).name == "nvlink3"
    assert target.link(last_two, ["data"], first=4).name == "ethernet"


@pytest.mark.catches("message-goes-around")
def test_ring_seconds_by_hand():
    target = parse_target("h100:1x8")
    link = target.gpu.nvlink
    seconds = target.ring_seconds(7.0 * link.bytes_per_s, 8, 3, link)
    assert seconds == pytest.approx(7 + 3 * 7 * link.latency_s)
    seconds = target.ring_seconds(7.0 * link.bytes_per_s, 8, 3, link, "collective-permute")
    assert seconds == pytest.approx(7 + 3 * link.latency_s, rel=1e-9)


@pytest.mark.catches("sums-go-around")
def test_sums_among_many_go_up_a_tree_and_down():
    among = {2: 1, 4: 3, 8: 6, 64: 12, 256: 16, 384: 18}
    assert {size: hops("all-reduce", size) for size in among} == among
    assert hops("all-gather", 256) == hops("reduce-scatter", 256) == 255
