"""`--plan auto`: found for what is there, and what is given by hand holds."""

import dataclasses
import functools
import json
import types

import pytest

from colossax.aot import parse_target
from colossax.cli import main
from colossax.cli.options.arguments import Parser
from colossax.cli.train import add_arguments, configure
from colossax.config import Plan, Segment
from colossax.errors import InputError, PlanError
from colossax.planner import auto
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Asked, Subject, plan_run, planned
from colossax.planner.searching.search import search
from colossax.recipes import recipe
from colossax.tasks import task_of

TARGET = parse_target("h100:1x8")


def gpus(*nodes, kind="NVIDIA H100 80GB HBM3"):
    """Devices as JAX tells them, so many on each node."""
    return [
        types.SimpleNamespace(platform="gpu", device_kind=kind, slice_index=node, process_index=at)
        for node, count in enumerate(nodes)
        for at in range(count)
    ]


@pytest.mark.catches("all-devices-are-one-node")
def test_the_devices_that_are_there_are_a_target():
    assert auto.target_here(gpus(4)).name == "h100:1x4"
    assert auto.target_here(gpus(8, 8)).name == "h100:2x8"
    # Drivers say less than data sheets.
    assert auto.target_here(gpus(1, kind="NVIDIA H200")).name == "h200:1x1"
    # Where JAX does not say what NVLink connects, it is what a process has.
    apart = [
        types.SimpleNamespace(platform="gpu", device_kind="NVIDIA B200", process_index=at)
        for at in (0, 0, 1, 1)
    ]
    assert auto.target_here(apart).name == "b200:2x2"


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (gpus(2, kind="NVIDIA H100 PCIe"), "the devices are NVIDIA H100 PCIe, and plans are found"),
        (gpus(2) + gpus(2, kind="NVIDIA B200"), "NVIDIA B200 and NVIDIA H100 80GB HBM3, and plans"),
        (gpus(8, 4), "nodes have 4 and 8 of the devices.*give --devices 4"),
    ],
)
def test_devices_that_nothing_is_known_of_are_refused(devices, said):
    with pytest.raises(InputError, match=said):
        auto.target_here(devices)


def test_cpus_are_refused_with_the_way_that_there_is(capsys, tmp_path):
    words = ["train", "llama_tiny", "--plan", "auto", "--steps", "1", "--out", str(tmp_path / "r")]
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--plan auto: there are 8 cpu devices, for which nothing can be compiled ahead" in said
    assert "--target h100:1x8 --out plan.json, and give --plan plan.json" in said
    assert not (tmp_path / "r").exists()


@pytest.fixture(scope="module")
def profile():
    """The recipe, read once."""
    config = recipe("llama_tiny")
    return profile_task(task_of(config), config.plan, TARGET)


@pytest.fixture
def by_formula(monkeypatch, profile):
    """Nothing is compiled but what is given by hand; its bytes can be set."""
    sizes = types.SimpleNamespace(total=1e9, host=0, plans=[])

    def compiled(subject, plans, target, processes):
        sizes.plans += plans
        facts = {"host_bytes": sizes.host, "collectives": []}
        return [{"device_bytes": {"total": sizes.total}, **facts} for _ in plans]

    monkeypatch.setattr(auto, "plan_run", functools.partial(plan_run, verify=False))
    monkeypatch.setattr(auto, "compiled", compiled)
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    return sizes


def find(plan=None, **changes):
    config = recipe("llama_tiny")
    lines = []
    plan = config.plan if plan is None else plan
    found = auto.find_plan(Subject.of(config), plan, TARGET, tell=lines.append, **changes)
    return found, lines


@pytest.mark.catches("a-mesh-by-hand-is-forgotten")
def test_a_mesh_that_is_given_holds_and_the_best_is_told(by_formula):
    best, lines = find()
    assert f"plan auto, {TARGET.name}: " in lines[-1]
    assert "of each device at a time" in lines[-1]
    plan = recipe("llama_tiny").plan.replace(mesh={"fsdp": -1, "tensor": 2})
    found, _ = find(plan, mesh_given=True)
    assert found.mesh == {"fsdp": 4, "tensor": 2}
    assert best.mesh != found.mesh
    assert find(plan)[0].mesh == best.mesh
    with pytest.raises(PlanError, match="axis 'ring_in' is given, which --plan auto does not"):
        find(plan.replace(mesh={"ring_in": 2, "fsdp": 4}), mesh_given=True)


@pytest.mark.catches("too-large-by-hand-is-named")
def test_what_is_put_over_it_is_compiled_too(by_formula):
    def over(plan):
        return plan.replace(segments=(Segment(remat="full"),))

    best, _ = find()
    assert not by_formula.plans
    found, lines = find(over=over)
    assert found == over(best)
    assert by_formula.plans == [found]
    assert "put over it: 0.93 GiB compiled, fits" in lines[-1]
    by_formula.total = 90e9
    with pytest.raises(PlanError, match=r"83.82 GiB compiled, of 76.\d\d that a step may take"):
        find(over=over)


@pytest.mark.catches("a-budget-by-hand-is-forgotten")
def test_the_budget_is_what_is_there_or_what_is_given(by_formula):
    plan = recipe("llama_tiny").plan
    given = plan.replace(offload=dataclasses.replace(plan.offload, device_gb=2.0))
    found, lines = find(given)
    assert "of 1.9 GiB that a step may take" in lines[-1]
    assert found.offload.device_gb is None
    assert "of 3.6 GiB" in find(memory=4 * 10**9)[1][-1]
    with pytest.raises(PlanError, match=r"plan.offload.device_gb: 2 GB are given, and a device"):
        find(given, memory=10**9)


@pytest.mark.catches("host-memory-by-hand-is-not-counted")
@pytest.mark.catches("auto-leaves-host-memory-alone")
def test_host_memory_is_used_where_offload_is_auto(by_formula, profile):
    plan = recipe("llama_tiny").plan
    asked = Asked(sizes={"data": 8})
    smallest = search(profile, plan, TARGET, room=1.0, asked=asked).smallest
    assert smallest is not None
    least = 0.95 * smallest.predicted.bytes.total
    plan = plan.replace(mesh={"data": 8})

    def with_offload(**changes):
        return plan.replace(offload=dataclasses.replace(plan.offload, **changes))

    small = {"device_gb": least / 1e9}
    with pytest.raises(PlanError, match="nothing that is searched fits"):
        find(with_offload(**small), mesh_given=True)
    found, lines = find(with_offload(auto=True, host_gb=1.0, **small), mesh_given=True)
    assert found.offload.wanted
    assert not found.offload.auto
    assert found.offload.host_gb is None
    assert "in host memory " in lines[-1]
    by_formula.total, by_formula.host = 1e3, 2e9
    given, over = with_offload(auto=True, host_gb=1.0, **small), Segment(remat="full")

    def by_hand(one):
        return one.replace(segments=(over,), loss=dataclasses.replace(one.loss, vocab_chunks=4))

    with pytest.raises(PlanError, match=r"2.00 GB of the host for each device, of 1.00 that it"):
        find(given, mesh_given=True, over=by_hand)
    with pytest.raises(PlanError, match=r"hosts of h100:1x8 have is not known; give how much"):
        find(with_offload(auto=True, **small), mesh_given=True)


@pytest.mark.slow
@pytest.mark.catches("the-plan-that-was-found-is-lost")
def test_a_run_keeps_the_plan_that_was_found_and_goes_on_with_it(
    by_formula, monkeypatch, capsys, tmp_path
):
    words = ["--out", str(tmp_path / "run"), "--trackers", "json"]
    monkeypatch.setattr(planned, "profile_task", profile_task)
    monkeypatch.setattr(auto, "target_here", lambda _: TARGET)
    given = ["--plan", "auto", "--plan.mesh", "fsdp=8", "--plan.remat", "full", "--steps", "1"]
    assert main(["train", "vit_digits", *words, *given]) == 0
    assert f"plan auto, {TARGET.name}: fsdp over 8, zero" in capsys.readouterr().err
    written = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    plan = Plan.from_json(written["config"]["plan"])
    assert plan.mesh == {"fsdp": 8}
    assert [segment.remat for segment in plan.segments] == ["full"]
    assert by_formula.plans in ([], [plan])
    # It goes on without a search, on another mesh if that is asked for.
    parser = Parser(prog="colossax train", description="")
    add_arguments(parser, "train")
    resumed = parser.parse([*words, "--resume"])
    assert configure(resumed, []).plan == plan
    across = configure(resumed, [("plan.mesh", "data=2,fsdp=4")]).plan
    assert across == plan.replace(mesh={"data": 2, "fsdp": 4})


def test_a_preset_beside_it_is_refused(capsys):
    words = ["inspect", "llama_tiny", "--target", "h100:1x8", "--plan", "auto"]
    assert main([*words, "--plan.preset", "zero3"]) == 2
    said = capsys.readouterr().err
    assert "--plan auto finds mesh and rules, and --plan.preset gives them; leave one" in said
