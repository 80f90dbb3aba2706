"""What an inspection says of copies between GPU and host; the programs are written by hand."""

import dataclasses
import json

import pytest

from colossax.aot import MemoryReport, Program, parse_target
from colossax.config import Precision
from colossax.pipeline import Costs, schedule, simulate
from colossax.planner import Inspection, compare
from colossax.planner.counting.inspection import _compute_s
from colossax.planner.counting.stage_cost import StageCost
from colossax.planner.counting.stage_programs import Edge, ProgramsCost
from colossax.planner.counting.traced_flops import TracedFlops
from colossax.planner.counting.traffic import (
    ASSUMED_EFFICIENCY,
    HIDING_FORMULA,
    HostTraffic,
    host_traffic,
)
from colossax.planner.telling import describe, describe_many
from colossax.recipes import recipe
from colossax.step.offloaded.disk import DiskCost
from tests.aot.test_transfers import ADD, DOT, FETCH, FETCHED, ON_HOST, program

TARGET = parse_target("h200:1x8")
PEAK = 989e12
STREAMED = program(
    FETCH, DOT, FETCHED, f"%out = {ON_HOST} copy(%x)", f"%again = {ON_HOST} copy(%x)"
)
"""Six times 128 bytes up beside a matmul, twelve times 128 bytes down."""


def traffic(hlo=STREAMED, *, flops_per_token=6, peak=PEAK, target=TARGET):
    return host_traffic(hlo, target, flops_per_token=flops_per_token, peak=peak)


def inspection(host_traffic: HostTraffic | None) -> Inspection:
    return Inspection(
        name="llama_tiny",
        plan=recipe("llama_tiny").plan,
        target=TARGET,
        parameters=10**9,
        program=Program(
            hlo="", assignment="", live_ranges="", stats=None, messages="", compile_s=1.0
        ),
        memory=MemoryReport(
            total_bytes=2**30,
            argument_bytes=2**30,
            temp_bytes=0,
            host_bytes=2**31,
            terms={"parameters": 2**30},
            largest=(),
        ),
        links=(),
        limit_bytes=2**37,
        fits=True,
        attention="xla",
        flops_per_token=6 * 10**9,
        compute_s=1.0,
        microbatch=1,
        microbatches=1,
        host_traffic=host_traffic,
    )


def test_bytes_and_seconds_by_direction():
    found = traffic()
    assert (found.up_bytes, found.down_bytes, found.sync_in_loops) == (6 * 128, 12 * 128, 12)
    assert found.up_s == 6 * 128 / TARGET.gpu.pcie_bytes_per_s
    assert found.down_s == 2 * found.up_s


def test_tokens_that_hide_the_copies():
    """h · bytes · F / (8 B) of one GPU, with 6 FLOPs per parameter and token as the model's own."""
    one = parse_target("h200:1x1")
    parameters = 1000
    per_parameter = 12 * 128 / parameters
    achieved = PEAK * ASSUMED_EFFICIENCY
    expected = per_parameter * achieved / (8 * one.gpu.pcie_bytes_per_s)
    found = traffic(flops_per_token=6 * parameters, target=one)
    assert found.hiding_tokens == pytest.approx(expected)
    eight = traffic(flops_per_token=6 * parameters)  # of eight GPUs, each with the same bytes
    assert eight.hiding_tokens == pytest.approx(8 * expected)


def test_14_bytes_each_way_take_20_thousand_tokens_of_an_h200():
    scale = 10**9
    text = STREAMED.replace("[6,8,4]", f"[6,{scale},4]").replace("[1,8,4]", f"[1,{scale},4]")
    found = traffic(
        text, target=parse_target("h200:1x1"), flops_per_token=6 * 12 * 16 * scale // 14
    )
    assert found.down_bytes == 12 * 16 * scale
    assert found.hiding_tokens == pytest.approx(20_000, rel=0.02)


def test_an_unknown_peak_leaves_the_tokens_unknown():
    assert traffic(peak=None).hiding_tokens is None
    text = describe(inspection(traffic(peak=None)))
    assert "hidden by an unknown number of tokens per step" in text


def test_a_program_that_copies_nothing_says_nothing_of_it():
    none = traffic(program(ADD))
    assert none is None
    text = describe(inspection(none))
    assert "host memory: 2.00 GiB\nlargest temporaries:" in text
    assert "copies between" not in text
    assert "host_traffic" not in inspection(none).to_json()


def test_the_table_for_people():
    found = dataclasses.replace(
        traffic(), up_s=1.5, down_s=3.0, hiding_tokens=12_345.6, up_bytes=10**9
    )
    totals = tuple(dataclasses.replace(t, bytes=t.bytes * 10**9) for t in found.totals)
    text = describe(inspection(dataclasses.replace(found, totals=totals)))
    start = text.index("copies between")
    assert text[start : text.index("largest temporaries")].splitlines() == [
        "copies between device and host, per device and step, at the PCIe rate:",
        "  direction  times  GB        seconds  beside a matmul  synchronous in loops",
        "  to device  6      768.000   1.5000   6                0",
        "  to host    12     1536.000  3.0000   0                12",
        f"hidden by 12,346 tokens per step of all devices ({HIDING_FORMULA})",
    ]


def test_the_same_facts_as_json():
    found = traffic()
    said = json.loads(json.dumps(inspection(found).to_json()))["host_traffic"]
    assert said["to_device_bytes"] == 6 * 128
    assert said["to_host_bytes"] == 12 * 128
    assert said["to_host_s"] == found.down_s
    assert said["sync_in_loops"] == 12
    assert said["hiding_tokens"] == found.hiding_tokens
    assert said["hiding_formula"] == HIDING_FORMULA
    assert [one["direction"] for one in said["by_direction"]] == ["to_device", "to_host"]
    assert said["by_direction"][0]["beside_matmul"] == 6


def test_what_is_updated_after_the_program_is_said():
    disk = DiskCost(
        layers=40,
        file_bytes=2**33,
        read_bytes=3 * 10**9,
        written_bytes=4 * 10**9,
        memory_bytes=2**29,
    )
    one = dataclasses.replace(inspection(traffic()), disk=disk, cpu_layers=8)
    text = describe(one)
    start = text.index("disk: ")
    assert text[start : text.index("largest temporaries")].splitlines() == [
        "disk: 8.00 GiB in one file for 40 layers, 3.000 GB read and 4.000 GB written per step,"
        " through 0.50 GiB more of host memory",
        "the CPU updates 8 layers",
        "these layers are updated after the program above: no computing hides that",
    ]
    assert one.to_json()["disk"] == dataclasses.asdict(disk)
    assert one.to_json()["cpu_layers"] == 8
    assert "disk: " not in describe(inspection(traffic()))


@pytest.mark.catches("unknown-flops-not-said")
def test_what_is_not_known_of_a_model_is_said():
    """Where a task gives no FLOPs, those of the traced step stand in."""
    known = inspection(traffic())
    text = describe(known)
    assert "model FLOPs per token: 6.00 G (recomputation not counted)" in text
    assert "attention by xla" in text and "traced" not in text
    assert "traced_flops" not in known.to_json()
    traced = TracedFlops(flops=3 * 10**12, left_out=("Pallas kernels",))
    one = dataclasses.replace(
        known,
        flops_per_token=None,
        traced=traced,
        attention=None,
        host_traffic=traffic(flops_per_token=None),
    )
    text = describe(one)
    assert "model FLOPs: not known, the task gives none (Task.flops, Task.tokens)" in text
    assert "step FLOPs as traced: 3000.00 G of matmuls and convolutions on all devices" in text
    assert "  not in it: Pallas kernels" in text
    assert "attention by" not in text
    assert "hidden by an unknown number of tokens per step" in text
    found = one.to_json()["traced_flops"]
    assert found == {"flops": 3 * 10**12, "left_out": ("Pallas kernels",), "float8_flops": 0}
    assert one.to_json()["flops_per_token"] is None


def test_kernels_whose_proof_is_assumed_are_named():
    plain = inspection(None)
    assert plain.to_json()["kernel_proof"] is None
    assert "proof assumed" not in describe(plain) + describe_many({"a": plain})
    assumed = dataclasses.replace(plain, attention="mosaic", proof_assumed=True)
    assert assumed.to_json()["kernel_proof"] == "assumed"
    for text in (describe(assumed), describe_many({"a": plain, "b": assumed})):
        assert text.count("kernels: proof assumed; on the GPUs 'auto' takes them once") == 1


def with_stages(form, *, microbatches=1, copied_s=0.0):
    """A second of compute on four stages, in one program or in programs of their own."""
    table = schedule("1f1b", 4, microbatches, form=form)
    report = simulate(table, Costs(), form)
    if form == "lockstep":
        cost = StageCost(schedule="1f1b", table=table, report=report, layers=())
    else:
        sent = {"bytes": 1, "messages": 1, "link": "ib", "seconds": copied_s, "passed_s": copied_s}
        cost = ProgramsCost(
            schedule="1f1b",
            table=table,
            costs=Costs(),
            report=report,
            stages=(),
            edges=(Edge(origin=0, end=1, **sent),),
            step_s=None,
            programs=(),
            flops=TracedFlops(flops=0, left_out=()),
        )
    return dataclasses.replace(inspection(None), pipeline=cost)


def test_plans_are_compared_with_the_bubble_of_their_pipelines():
    plain = dataclasses.replace(inspection(None), compute_s=2.0)
    for form in ("lockstep", "free"):
        empty, full = with_stages(form), with_stages(form, microbatches=64)
        assert empty.bubble == pytest.approx(0.75)
        assert empty.roofline_s == pytest.approx(4.0)
        assert compare({"empty": empty, "plain": plain, "full": full}) == ["full", "plain", "empty"]


def test_plans_are_compared_with_what_their_stages_copy():
    plain = dataclasses.replace(inspection(None), compute_s=6.0)
    assert with_stages("free", copied_s=3.0).roofline_s == pytest.approx(4.0)
    slow = with_stages("free", copied_s=7.0)
    assert compare({"slow": slow, "plain": plain}) == ["plain", "slow"]


def test_the_table_of_plans_has_their_bubbles():
    plain, staged = inspection(None), with_stages("free")
    assert "bubble" not in describe_many({"plain": plain})
    head, first, second = describe_many({"staged": staged, "plain": plain}).splitlines()
    assert "compute s  bubble  collectives s" in head
    assert first.split()[:6] == ["plain", "1.00", "yes", "0.00", "1.000", "-"]
    assert second.split()[:7] == ["staged", "1.00", "yes", "0.00", "1.000", "75", "%"]


@pytest.mark.catches("float8-predicted-for-all")
def test_of_float8_only_what_was_traced_in_it_is_predicted_at_its_peak():
    """Of 12 Mflop 3 are said to be recomputed; the rest takes half of the time.

    Of one program of all stages what fills its bubble is left out too.
    """
    target = parse_target("h100:1x2")
    traced = TracedFlops(flops=20 * 10**6, left_out=(), float8_flops=12 * 10**6)
    peak = 2 * 989e12

    def found(matmul, flops=15 * 10**6, pipeline=None):
        precision = Precision(compute="bfloat16", matmul=matmul)
        counted = traced if matmul == "float8" else dataclasses.replace(traced, float8_flops=0)
        return _compute_s(flops, precision, target, counted, pipeline) * peak / 1e6

    assert found("compute") == pytest.approx(15)
    assert found("float8") == pytest.approx(15 - 9 / 2)
    assert found("float8", flops=None) == pytest.approx(20 - 12 / 2)
    one, apart = (with_stages(form).pipeline for form in ("lockstep", "free"))
    assert found("float8", pipeline=one) == pytest.approx(15 - 9 / 4 / 2)
    assert found("float8", pipeline=apart) == pytest.approx(15 - 9 / 2)
