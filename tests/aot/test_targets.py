"""Targets: what can be named, what is refused, which link an axis crosses."""

import json
from importlib import resources

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from colossax.aot import gpu_keys, parse_target
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
    ],
)
def test_what_is_no_target_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse_target(text)


def test_an_unknown_network_is_refused():
    with pytest.raises(InputError, match="no network is called 'infiniband'"):
        parse_target("h100:1x8", network="infiniband")


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


def test_ring_seconds_by_hand():
    target = parse_target("h100:1x8")
    link = target.gpu.nvlink
    seconds = target.ring_seconds(7.0 * link.bytes_per_s, 8, 3, link)
    assert seconds == pytest.approx(7 + 3 * 7 * link.latency_s)
