"""Measured speeds and links: kept, found again, given in their place, refused when damaged."""

import dataclasses
import json

import pytest

from colossax.errors import InputError
from colossax.pipeline.cuts import LayerCost, Link, StageDevice, cut_layers
from colossax.pipeline.measured import (
    DeviceTime,
    LayerTimes,
    LinkTimes,
    PairTime,
    layer_times_path,
    link_times_path,
    load_layer_times,
    load_link_times,
    save_layer_times,
    save_link_times,
    stage_link,
    stage_seconds,
    stage_speeds,
)


def timed(*seconds):
    return tuple(DeviceTime(number=n, seconds=s) for n, s in enumerate(seconds))


FAST = LayerTimes(
    recipe="llama3_8b",
    layer="tokens 1 x 8192, bfloat16, remat full",
    device_kind="NVIDIA H100",
    platform="gpu",
    jax="0.10.2",
    colossax="0.1.0",
    devices=timed(0.01, 0.01, 0.02),
)
SLOW = dataclasses.replace(FAST, device_kind="NVIDIA A100", devices=timed(0.02, 0.03, 0.025))
LINKS = LinkTimes(
    recipe="llama3_8b",
    sent_bytes=2.0**26,
    device_kind="NVIDIA A100",
    other_kind="NVIDIA H100",
    platform="gpu",
    jax="0.10.2",
    colossax="0.1.0",
    pairs=tuple(PairTime(source=n, target=n + 1, seconds=s) for n, s in enumerate((0.5, 1.0, 2.0))),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("COLOSSAX_CACHE", str(folder))
    return folder


@pytest.mark.catches("measured-speeds")
def test_speeds_are_relative_to_the_fastest_of_those_asked_for():
    save_layer_times(FAST)
    save_layer_times(SLOW)
    kinds = ["NVIDIA A100", "NVIDIA H100", "NVIDIA A100"]
    assert stage_speeds(kinds, "llama3_8b") == pytest.approx((0.4, 1.0, 0.4))
    assert stage_speeds(["NVIDIA A100"] * 2, "llama3_8b") == (1.0, 1.0)
    assert stage_seconds(kinds, "llama3_8b") == (0.025, 0.01, 0.025)
    own = stage_speeds(kinds, "llama3_8b", numbers=[0, 2, 9])
    assert own == pytest.approx((1.0, 1.0, 0.8)), "its own where it was measured, else the median"


def test_measured_speeds_cut_layers():
    save_layer_times(FAST)
    save_layer_times(SLOW)
    speeds = stage_speeds(["NVIDIA A100", "NVIDIA H100"], "llama3_8b")
    devices = [StageDevice(speed=speed) for speed in speeds]
    assert cut_layers([LayerCost(seconds=1.0)] * 14, devices).layers == (4, 10)


def test_what_is_given_counts_in_place_of_what_was_measured():
    assert stage_speeds(["a", "b"], "llama3_8b", given=[1.0, 4.0]) == (0.25, 1.0)
    link = Link(bytes_per_s=5.0)
    assert stage_link("a", "b", "llama3_8b", given=link) == link


def test_a_link_has_the_median_rate_whichever_end_is_first():
    save_link_times(LINKS)
    for ends in (("NVIDIA A100", "NVIDIA H100"), ("NVIDIA H100", "NVIDIA A100")):
        assert stage_link(*ends, "llama3_8b") == Link(bytes_per_s=2.0**26)


def test_they_are_kept_by_kind_and_recipe(cache, tmp_path):
    path = save_layer_times(FAST)
    assert path == layer_times_path("NVIDIA H100", "llama3_8b")
    assert path == cache / "stages" / "nvidia-h100" / "llama3-8b.json"
    assert load_layer_times("NVIDIA H100", "llama3_8b") == FAST
    assert load_layer_times("NVIDIA H100", "llama3_70b") is None
    assert load_layer_times("NVIDIA A100", "llama3_8b") is None
    path = save_link_times(LINKS)
    assert path == link_times_path("NVIDIA H100", "NVIDIA A100", "llama3_8b")
    assert path == cache / "links" / "nvidia-a100-nvidia-h100" / "llama3-8b.json"
    assert load_link_times("NVIDIA A100", "NVIDIA H100", "llama3_8b") == LINKS
    assert save_layer_times(SLOW, tmp_path / "mine.json") == tmp_path / "mine.json"
    assert load_layer_times("NVIDIA A100", "llama3_8b") is None


@pytest.mark.catches("measured-other-layer")
def test_times_of_different_layers_are_not_compared():
    save_layer_times(FAST)
    save_layer_times(dataclasses.replace(SLOW, layer="tokens 2 x 8192, bfloat16, remat full"))
    with pytest.raises(InputError, match="'NVIDIA A100' was measured with tokens 2 x 8192, .* and"):
        stage_speeds(["NVIDIA H100", "NVIDIA A100"], "llama3_8b")


def test_what_was_not_measured_is_refused_with_what_measures_it():
    save_layer_times(FAST)
    sentence = "'NVIDIA A100'; run colossax bench stages llama3_8b there, or give speeds"
    with pytest.raises(InputError, match=sentence):
        stage_speeds(["NVIDIA H100", "NVIDIA A100"], "llama3_8b")
    sentence = "between 'NVIDIA H100' and 'NVIDIA A100'; run colossax bench links llama3_8b where"
    with pytest.raises(InputError, match=sentence):
        stage_link("NVIDIA H100", "NVIDIA A100", "llama3_8b")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([1.0], "speeds: found 1 for 2 devices; give one for each"),
        ([1.0, 0.0], r"speeds\[1\]: found 0.0; give a number above 0"),
    ],
)
def test_speeds_that_cannot_be_are_refused(given, sentence):
    with pytest.raises(InputError, match=sentence):
        stage_speeds(["a", "b"], "llama3_8b", given=given)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "{",
            "llama3-8b.json: cannot be read .*; measure again with colossax bench stages llama3_8b",
        ),
        ("{}", "llama3-8b.json: .*missing.*; check the values given"),
        ('{"device": [1]}', "unknown field 'device'; did you mean 'devices'?"),
    ],
)
def test_damaged_files_are_refused(text, sentence):
    path = save_layer_times(FAST)
    path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        load_layer_times("NVIDIA H100", "llama3_8b")


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        ("[]", "stages.devices: found none; give one or more"),
        (
            '[{"number": 0, "seconds": -1.0}]',
            r"stages.devices\[0\].seconds: found -1.0; give a number above 0",
        ),
        (
            '[{"number": 0, "seconds": "fast"}]',
            r"devices\[0\].seconds: expected float, found 'fast'",
        ),
        ("3", r"devices: expected a list, found 3; write it as \[...\]"),
    ],
)
def test_files_with_other_values_are_refused(devices, sentence):
    path = save_layer_times(FAST)
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "devices": json.loads(devices)}))
    with pytest.raises(InputError, match=sentence):
        load_layer_times("NVIDIA H100", "llama3_8b")
