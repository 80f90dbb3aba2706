"""Rates that were measured: how they are fitted, read, told and refused."""

import dataclasses
import functools
import json

import pytest

from colossax.aot import parse_target
from colossax.aot.targets import Link
from colossax.cli import main
from colossax.config import Precision, preset
from colossax.errors import InputError, PlanError
from colossax.pallas.bench import Effort
from colossax.pipeline.measured import (
    CollectiveRate,
    DeviceRates,
    LinkTimes,
    PairTime,
    save_link_times,
)
from colossax.planner import auto
from colossax.planner.deciding import calibrating
from colossax.planner.deciding.calibrating import KINDS, fitted, measure_collectives
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Subject, planned, predict
from colossax.planner.searching.asked import Asked
from colossax.planner.searching.bounds import Bounds
from colossax.planner.searching.calibrated import calibrated, calibrated_by, ratio
from colossax.planner.searching.search import search
from colossax.planner.searching.seconds import Seconds, rates_of
from colossax.planner.searching.verifying import true_seconds
from colossax.recipes import recipe
from colossax.tasks import task_of

H100 = "NVIDIA H100 80GB HBM3"
NODE = parse_target("h100:1x8")
PLAN = recipe("llama_tiny").plan
SLOW = tuple(
    CollectiveRate(kind=kind, devices=4, latency_s=1e-3, bytes_per_s=1e6 * (at + 1))
    for at, kind in enumerate(KINDS)
)
ALONE = DeviceRates(dtype="float32", flops_per_s=1e12, bytes_per_s=1e11)


def times(**changes):
    given = {
        "recipe": "llama_tiny",
        "sent_bytes": 1e6,
        "device_kind": H100,
        "other_kind": H100,
        "platform": "gpu",
        "jax": "0",
        "colossax": "0",
        "pairs": (PairTime(source=0, target=1, seconds=1e-3),),
    }
    return LinkTimes(**{**given, **changes})


@pytest.fixture(scope="module")
def profile():
    return profile_task(task_of(recipe("llama_tiny")), PLAN, NODE)


@pytest.mark.catches("latency-is-of-a-collective")
def test_latency_and_rate_are_found_again():
    sent = [float(4**n) for n in range(4, 14)]
    for latency, rate in ((5e-6, 3e11), (0.0, 1e9)):
        seconds = [7 * latency + one / rate for one in sent]
        assert fitted(7, sent, seconds) == pytest.approx((latency, rate), rel=1e-6, abs=1e-12)
    latency, rate = fitted(7, sent, [one**1.5 / 1e12 for one in sent])
    assert latency == 0.0 and rate > 0


def test_all_kinds_are_measured_among_all_devices(devices, monkeypatch):
    """Each moves what formulas say that it moves: a made-up clock charges by those bytes."""
    ran = {}

    def timed(functions, sets, effort):
        ran.update({name: function(*sets[0]) for name, function in functions.items()})
        charged = {}
        for name in functions:
            kind, size = name.split()
            share = 0.75 * (2 if kind == "all-reduce" else 1)
            charged[name] = [3 * 1e-6 + share * int(size) / 1e9]
        return charged

    monkeypatch.setattr(calibrating, "time_calls", timed)
    found = measure_collectives(devices[:4], Effort(seconds=0.001, repeats=1))
    assert tuple(one.kind for one in found) == KINDS
    for one in found:
        assert one.devices == 4
        assert (one.latency_s, one.bytes_per_s) == pytest.approx((1e-6, 1e9), rel=1e-6)
    size = calibrating.SIZES["cpu"][0]
    local = {kind: ran[f"{kind} {size}"].addressable_shards[0].data for kind in KINDS}
    assert {kind: x.nbytes for kind, x in local.items()} == {
        "all-gather": size,
        "reduce-scatter": size / 4,
        "all-reduce": size,
        "all-to-all": size,
    }
    assert float(local["all-reduce"][0]) == float(local["reduce-scatter"][0]) == 4.0


@pytest.mark.catches("measured-links-go-between-nodes")
def test_what_was_measured_takes_the_place_of_what_is_assumed():
    target = parse_target("h100:2x4")
    assumed = rates_of(target, PLAN)
    found = calibrated(times(collectives=SLOW, device=ALONE), target, PLAN, "here")
    assert found.rates.matmuls == 1e12
    assert found.rates.memory == 1e11
    assert found.rates.within["all-reduce"].bytes_per_s == 3e6
    assert found.rates.node.bytes_per_s == 1e6
    assert (found.rates.network, found.rates.pairs) == (assumed.network, assumed.pairs)
    assert found.line == (
        "here: measured are all-gather, reduce-scatter, all-reduce, all-to-all within a node of 4;"
        " updates, as a copy; matmuls in float32; assumed are attention between tokens; links"
        " between nodes; what is hidden beside compute"
    )
    narrow = PLAN.replace(precision=Precision(compute="bfloat16"))
    other = calibrated(times(collectives=SLOW, device=ALONE), target, narrow, "here")
    assert other.rates.matmuls == rates_of(target, narrow).matmuls
    assert "assumed are attention between tokens; matmuls; links between nodes" in other.line
    pairs = calibrated(times(), NODE, PLAN, "here")
    assert pairs.rates.node == Link(name="measured", latency_s=0.0, bytes_per_s=1e9)
    assert pairs.line == (
        "here: measured are links within a node; assumed are attention between tokens; matmuls;"
        " updates; what is hidden beside compute"
    )


@pytest.mark.catches("kinds-within-a-node-are-forgotten")
def test_links_of_a_node_are_those_of_rings_within_it(profile):
    target = parse_target("h100:2x4")
    rates = calibrated(times(collectives=SLOW), target, PLAN, "here").rates
    within = preset("zero3", mesh={"data": 2, "fsdp": 4})
    across = preset("zero3", mesh={"fsdp": 8})
    slow, fast = (predict(profile, within, target, given).seconds for given in (rates, None))
    assert slow.beside > 100 * fast.beside
    slow, fast = (predict(profile, across, target, given).seconds for given in (rates, None))
    assert slow.beside == fast.beside
    sent = [one for one in predict(profile, within, target).sent if one.kind == "reduce-scatter"]
    own = dataclasses.replace(rates, within={"reduce-scatter": rates.node})
    none = dataclasses.replace(
        own, within={"reduce-scatter": Link(name="none", latency_s=0.0, bytes_per_s=1e30)}
    )
    less = (
        predict(profile, within, target, own).seconds.beside
        - predict(profile, within, target, none).seconds.beside
    )
    hops = sum(3 * one.times for one in sent) * 1e-3
    assert less == pytest.approx(hops + sum(one.bytes for one in sent) / 1e6, rel=1e-6)


@pytest.mark.catches("bounds-know-no-kinds-within")
def test_bounds_hold_with_them(profile):
    """Also where kinds within a node are faster than the link that has no kind."""
    fast = tuple(dataclasses.replace(one, bytes_per_s=1e12, latency_s=0.0) for one in SLOW)
    rates = calibrated(times(collectives=fast), NODE, PLAN, "here").rates
    rates = dataclasses.replace(rates, node=dataclasses.replace(rates.node, bytes_per_s=1e3))
    asked = Asked(forbidden=frozenset({"stage", "ring", "ulysses"}))
    every = search(profile, PLAN, NODE, room=1e9, rates=rates, asked=asked).candidates
    known = {one.label: one.predicted.seconds.total for one in every}
    checked = 0
    for at_least, mesh, way in Bounds(profile, PLAN, NODE, rates).ordered(asked.pinned):
        label = " ".join([*(f"{axis}={n}" for axis, n in mesh.items() if n > 1), way.words])
        if label in known:
            checked += 1
            assert at_least <= known[label] * (1 + 1e-9), label
    assert checked == len(known) > 5


@pytest.mark.catches("compiled-collectives-are-assumed")
def test_collectives_of_a_program_take_what_was_measured():
    rates = calibrated(times(collectives=SLOW), NODE, PLAN, "here").rates
    one = {
        "axis": "data x fsdp",
        "kind": "all-reduce",
        "count": 10,
        "ring_bytes": 3e6,
        "link": NODE.gpu.nvlink.name,
        "seconds": 0.5,
        "exposed_s": 0.25,
    }
    sizes = {"data": 2, "fsdp": 4, "tensor": 1}
    assert ratio(one, sizes, NODE, rates) == pytest.approx((10 * 6 * 1e-3 + 1.0) / 0.5)
    between = NODE.ring_seconds(3e6, 8, 10, rates.network, "all-reduce") / 0.5
    assert ratio({**one, "link": "ib"}, sizes, NODE, rates) == pytest.approx(between)
    assert ratio({**one, "axis": "groups of 8"}, sizes, NODE, rates) == 1.0
    before = Seconds(compute=1.0, waited=9.0, beside=9.0)
    found = {"collectives": [one]}
    assert true_seconds(before, found, NODE).waited == 0.25
    slow = true_seconds(before, found, NODE, lambda each: ratio(each, sizes, NODE, rates))
    assert (slow.waited, slow.beside) == pytest.approx((0.53, 0.53))


@pytest.mark.catches("rates-of-other-gpus-are-taken")
def test_what_is_of_other_gpus_or_no_such_file_is_refused(tmp_path):
    path = tmp_path / "links.json"
    with pytest.raises(InputError, match=r"links.json: there is no such file; write it on the GPU"):
        calibrated_by(path, NODE, PLAN)
    path.write_text("{", "utf-8")
    with pytest.raises(InputError, match="cannot be read .*; measure again with colossax bench li"):
        calibrated_by(path, NODE, PLAN)
    path.write_text(json.dumps({"recipe": "x"}), "utf-8")
    with pytest.raises(InputError, match="check the values given"):
        calibrated_by(path, NODE, PLAN)
    save_link_times(times(device_kind="NVIDIA B200", other_kind=H100), path)
    with pytest.raises(PlanError) as refused:
        calibrated_by(path, NODE, PLAN)
    assert str(refused.value) == (
        f"--rates {path}: was measured on NVIDIA B200 and {H100}, and target 'h100:1x8' is of"
        f" {H100}; measure there with colossax bench links llama_tiny, or give another target"
    )
    with pytest.raises(PlanError, match="rates are those of one kind of GPU, and target 'h100:1x4"):
        calibrated(times(), parse_target("h100:1x4+a100:1x4"), PLAN, "here")


@pytest.mark.catches("the-rates-file-is-not-read")
def test_the_command_ranks_by_a_file_and_says_so(tmp_path, capsys):
    path = tmp_path / "links.json"
    save_link_times(times(collectives=SLOW), path)
    words = ["plan", "llama_tiny", "--target", "h100:1x8", "--no-compile", "--pin", "data=8"]
    assert main([*words, "--rates", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rates"].startswith(f"--rates {path}: measured are all-gather, reduce-scatter")
    assert found["plans"][0]["seconds"] > 1.0  # of sums at 3 MB a second
    assert main([*words, "--rates", str(path)]) == 0
    assert found["rates"] in capsys.readouterr().out.splitlines()
    assert main([*words, "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)
    assert "rates" not in assumed and assumed["plans"][0]["seconds"] < 0.01
    assert main([*words, "--rates", str(tmp_path / "none")]) == 2
    assert "none: there is no such file; write it on the GPUs" in capsys.readouterr().err


@pytest.mark.catches("what-was-measured-here-is-not-used")
def test_plans_for_what_is_there_use_what_was_measured_there(monkeypatch, profile):
    given = []

    def run(*words, rates, **options):
        given.append(rates)
        return planned.plan_run(*words, rates=rates, verify=False, **options)

    monkeypatch.setattr(auto, "plan_run", run)
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    lines: list[str] = []
    config = recipe("llama_tiny")
    find = functools.partial(auto.find_plan, Subject.of(config), mesh_given=True)
    mesh = PLAN.replace(mesh={"fsdp": 8})
    find(mesh, NODE, measured=times(collectives=SLOW), tell=lines.append)
    find(mesh, NODE)
    assert given[0].rates.node.bytes_per_s == 1e6
    assert given[1] is None
    assert lines[0].startswith("plan auto, rates as bench links has them: measured are all-gather")
