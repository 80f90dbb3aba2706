"""Shares found by compiling, on host devices: budgets, refusals, what is known from before."""

import dataclasses
import functools
import json

import jax
import pytest

from colossax.aot import parse_target
from colossax.checkpoint import Checkpointer
from colossax.config import OffloadConfig, Segment, to_json
from colossax.errors import PlanError
from colossax.offload import GB, limits
from colossax.planner import fit_offload
from colossax.planner.deciding import fitting
from colossax.planner.task_step import task_step
from colossax.recipes import recipe
from colossax.run import RunFolder
from colossax.tasks import task_of
from colossax.tasks.config import train_config_from_json
from tests.cases import quick_first
from tests.launching import run, write_text

LAYERS = 4
LEAST_GB, ROOM_GB = 0.01, 0.0029


def tiny(**changes):
    """A run of `llama_tiny` with few tokens, and its offload to be found.

    With room for parameters and what backward keeps, not for all of the optimizer's state.
    """
    if "parameters" not in changes:
        changes = {"auto": True, "device_gb": ROOM_GB + LEAST_GB, "host_gb": 1.0, **changes}
    config = recipe("llama_tiny")
    offload = OffloadConfig(**changes)
    plan = config.plan.replace(mesh={}, segments=(Segment(remat="full"),), offload=offload)
    return config.replace(
        model=dataclasses.replace(config.model, layers=LAYERS, vocab=512, embed=64, mlp=512),
        data=dataclasses.replace(config.data, seq_len=64, global_batch=8),
        plan=plan,
    )


def needs(devices, plan, config):
    """Bytes of a device and of the host that a plan with shares needs."""
    trial = fitting.Trial(
        lambda p: task_step(task_of(config), p, devices), plan, task_of(config).shapes, None
    )
    found = trial.compiled()
    return found.device, found.host


def reckoned(trial):
    """What a compiler would say that places arrays as asked and takes nothing besides."""
    there = sum(trial.host_arrays().values())
    rest = whole_bytes(trial.step.bound.plan.segments) - there
    return fitting.StepBytes(device=round(LEAST_GB * GB) + rest, host=there)


@functools.cache
def whole_bytes(segments):
    """What layers have in host memory where all is there."""
    config = tiny(parameters=1.0, optimizer=1.0, activations=1.0)
    plan = config.plan.replace(segments=segments)
    shapes, devices = task_of(config).shapes, jax.devices()[:1]
    trial = fitting.Trial(lambda p: task_step(task_of(config), p, devices), plan, shapes, None)
    return sum(trial.host_arrays().values())


class Fitting:
    """`fit_offload` of a run, counting compilations."""

    def __init__(self, monkeypatch, devices, plain):
        self.compiled = 0
        self.devices = devices

        def counting(trial):
            self.compiled += 1
            return plain(trial)

        monkeypatch.setattr(fitting.Trial, "compiled", counting)

    def __call__(self, config, **options):
        before = self.compiled
        found = fit_offload(
            lambda plan: task_step(task_of(config), plan, self.devices),
            config.plan,
            task_of(config).shapes,
            **options,
        )
        assert self.compiled - before == found.compiles
        return found


@pytest.fixture
def fit(monkeypatch, tmp_path, devices):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    return Fitting(monkeypatch, devices[:1], reckoned)


@pytest.fixture
def really(monkeypatch, tmp_path, devices):
    """`fit` with a compiler."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    return Fitting(monkeypatch, devices[:1], fitting.Trial.compiled)


@pytest.fixture
def entries(tmp_path):
    return lambda: sorted((tmp_path / "cache" / "offload").glob("*"))


def test_the_plan_found_is_within_the_budgets_and_keeps_layers_on_the_device(fit):
    config = tiny()
    found, room = fit(config), config.plan.offload.device_gb * GB
    offload = found.plan.offload
    assert (offload.auto, offload.device_gb, offload.host_gb) == (False, None, None)
    assert found.device_bytes <= room and found.compiles <= fitting.MAX_COMPILES
    assert 0 < found.resident["parameters"] and sum(found.resident.values()) < 3 * LAYERS
    shares = {name: 1 - count / LAYERS for name, count in found.resident.items()}
    assert shares == {name: getattr(offload, name) for name in shares}
    assert found.line == (
        f"plan.offload auto: of 4 layers the device keeps"
        f" parameters of {found.resident['parameters']}, optimizer of"
        f" {found.resident['optimizer']}, activations of {found.resident['activations']};"
        f" {found.device_bytes / 1e6:.2f} MB of a device,"
        f" {found.host_bytes / 1e6:.2f} MB of the host for each ({found.compiles} compilations)"
    )


def test_more_room_keeps_more_until_nothing_leaves_the_device(really):
    config = tiny(device_gb=1.0)
    found = really(config)
    assert set(found.resident.values()) == {LAYERS} and found.host_bytes == 0
    assert needs(really.devices, found.plan, config) == (found.device_bytes, 0)
    assert found.plan.offload.fused  # layers are still updated during backward


def test_a_second_call_compiles_nothing(fit, entries):
    first, again = fit(tiny()), fit(tiny())
    assert (first.compiles, again.compiles) != (0, 0) and again.compiles == 0
    assert again == dataclasses.replace(first, compiles=0)
    assert again.line.endswith("(cached)")
    assert len(entries()) == 1


EVERYTHING = {"parameters": 1.0, "optimizer": 1.0, "activations": 1.0}

CHANGES = {
    "layers": lambda c: c.replace(model=dataclasses.replace(c.model, layers=2)),
    "rows": lambda c: c.replace(data=dataclasses.replace(c.data, global_batch=4)),
    "clipping": lambda c: c.replace(clip_norm=None),
    "optimizer": lambda c: c.replace(optimizer=dataclasses.replace(c.optimizer, state="mixed")),
    "remat": lambda c: c.replace(plan=c.plan.replace(segments=(Segment(remat="none"),))),
    "device": lambda c: with_offload(c, device_gb=0.6),
    "options": lambda c: c.replace(
        plan=c.plan.replace(compiler_options={"xla_cpu_enable_fast_math": False})
    ),
}


def with_offload(config, **changes):
    offload = dataclasses.replace(config.plan.offload, **changes)
    return config.replace(plan=config.plan.replace(offload=offload))


@pytest.fixture
def quick(fit, monkeypatch):
    """`fit` whose searches find a placement that is made up."""
    searches = []

    def search(make_step, plan, everything, budget):
        searches.append(plan)
        resident = {"parameters": 1, "optimizer": 0, "activations": 0}
        record = {"layers": everything.layers, "resident": resident}
        return {**record, "device_bytes": 7, "host_bytes": 9}, 0

    monkeypatch.setattr(fitting, "_search", search)
    fit.searches = searches
    return fit


@pytest.mark.parametrize("name", quick_first(CHANGES, 3))
def test_what_matters_is_looked_for_again(quick, name):
    config = tiny(device_gb=0.5)
    quick(config)
    quick(config)
    assert len(quick.searches) == 1
    quick(CHANGES[name](config))
    assert len(quick.searches) == 2


def test_a_smaller_host_is_looked_for_again_a_larger_one_is_not(fit):
    first = fit(tiny())
    assert fit(with_offload(tiny(), host_gb=2.0)).compiles == 0
    less = (first.host_bytes - 1) / GB
    with pytest.raises(PlanError, match="give host_gb"):
        fit(with_offload(tiny(), host_gb=less))


DAMAGED = {
    "empty": lambda text: "",
    "cut short": lambda text: text[: len(text) // 2],
    "no object": lambda text: "[]",
    "too many layers": lambda text: changed(text, resident={"parameters": 9, "optimizer": 0}),
    "no counts": lambda text: changed(text, resident=None),
    "words": lambda text: changed(text, device_bytes="7"),
    "of another format": lambda text: changed(text, format=0),
    "binary": lambda text: "\x00\udcff",
}


def changed(text, **fields):
    return json.dumps({**json.loads(text), **fields})


@pytest.mark.parametrize("how", quick_first(DAMAGED, 6))
def test_a_damaged_entry_is_ignored_and_written_again(quick, entries, how):
    first = quick(tiny(device_gb=0.5))
    (entry,) = entries()
    whole = entry.read_text()
    entry.write_bytes(DAMAGED[how](whole).encode(errors="surrogateescape"))
    assert quick(tiny(device_gb=0.5)) == first and len(quick.searches) == 2
    assert entry.read_text() == whole and entries() == [entry]


def test_without_a_folder_for_it_the_result_is_found_each_time(quick, tmp_path):
    (tmp_path / "cache").write_text("a file")
    quick(tiny(device_gb=0.5))
    quick(tiny(device_gb=0.5))
    assert len(quick.searches) == 2


@pytest.mark.catches("fit-not-corrected")
def test_a_choice_that_turns_out_too_large_is_corrected(fit, monkeypatch):
    plain = fitting.Trial.compiled
    surprise = []

    def compiled(trial):
        found = plain(trial)
        offload = trial.step.bound.plan.offload
        if offload.parameters < 1 and not surprise:
            surprise.append(offload)
            found = dataclasses.replace(found, device=found.device + 400_000)
        return found

    monkeypatch.setattr(fitting.Trial, "compiled", compiled)
    found = fit(tiny())
    assert found.compiles == 3 and found.device_bytes <= (ROOM_GB + LEAST_GB) * GB
    assert found.plan.offload != surprise[0]


def test_when_nothing_else_fits_all_layers_go_to_the_host(fit, monkeypatch):
    plain = fitting.Trial.compiled

    def compiled(trial):
        found = plain(trial)
        moved = trial.step.bound.plan.offload.parameters < 1
        return dataclasses.replace(found, device=found.device + moved * GB)

    monkeypatch.setattr(fitting.Trial, "compiled", compiled)
    found = fit(tiny())
    assert set(found.resident.values()) == {0} and found.device_bytes <= (ROOM_GB + LEAST_GB) * GB
    with pytest.raises(
        PlanError, match=r"of 4 layers as many as have to stay on the device take more"
    ):
        fit(with_offload(tiny(), host_gb=(found.host_bytes - 1000) / GB))


def test_a_budget_below_the_working_set_is_refused(fit):
    with pytest.raises(PlanError, match=r"0\.001 GB are given, and a device needs 0\.0\d+ GB even"):
        fit(tiny(device_gb=0.001))


def test_a_host_too_small_for_the_rest_is_refused(fit):
    with pytest.raises(PlanError, match=r"plan\.offload\.host_gb: 0\.0\d+ GB are missing") as said:
        fit(tiny(host_gb=0.001))
    words = str(said.value).replace(",", "").replace(";", "").split()
    enough = float(words[words.index("host_gb") + 1])
    assert fit(tiny(host_gb=enough)).host_bytes <= enough * GB


def test_host_memory_that_is_not_there_is_refused_before_anything_is_compiled(fit):
    with pytest.raises(PlanError, match=r"1000000\.000 GB for each of 1 device\(s\) of this host"):
        fit(tiny(host_gb=1e6))
    assert fit.compiled == 0


def test_free_host_memory_is_the_default(fit, monkeypatch):
    enough = fit(tiny(host_gb=1.0)).host_bytes
    monkeypatch.setattr(limits, "free_host_bytes", lambda: 2 * enough)  # of which half is left
    assert 0 < fit(tiny(host_gb=None)).host_bytes <= enough
    monkeypatch.setattr(limits, "free_host_bytes", lambda: 2**20)
    with pytest.raises(PlanError, match=r"plan\.offload\.host_gb"):
        fit(tiny(host_gb=None))


def test_devices_without_memory_of_their_own_need_a_budget(fit):
    with pytest.raises(PlanError, match=r"device_gb: these devices do not say how much memory"):
        fit(tiny(device_gb=None))


def test_of_a_target_the_host_is_not_known_and_the_device_is(fit):
    target = parse_target("h200:1x1")
    found = fit(tiny(host_gb=None, device_gb=1.0), target=target)
    assert set(found.resident.values()) == {LAYERS} and found.host_bytes == 0
    with pytest.raises(PlanError, match=r"stay in host memory and 0\.000 GB are given; give host"):
        fit(tiny(host_gb=None), target=target)
    with pytest.raises(PlanError, match=r"200 GB are given, and a device has 151\.4 GB"):
        fit(tiny(device_gb=200.0), target=target)


def test_pinned_memory_is_limited_by_xla(monkeypatch):
    monkeypatch.delenv(limits._PINNED_LIMIT, raising=False)
    limits._check_pinned(64 * 2**30)
    with pytest.raises(PlanError, match=r"69 GB of host memory at most; start with .*_GB=94 in"):
        limits._check_pinned(100 * GB)
    monkeypatch.setenv(limits._PINNED_LIMIT, "94")
    limits._check_pinned(100 * GB)


def test_segments_that_say_where_layers_live_are_refused(fit):
    config = tiny()
    segments = (Segment(offload="parameters"),)
    with pytest.raises(PlanError, match=r"names 'parameters', and plan\.offload 'auto' decides"):
        fit(config.replace(plan=config.plan.replace(segments=segments)))


def test_named_activations_stay_where_segments_put_them(fit):
    config = tiny()
    segments = (Segment(remat="full", offload="input"),)
    found = fit(config.replace(plan=config.plan.replace(segments=segments)))
    assert set(found.resident) == {"parameters", "optimizer"}
    assert found.plan.segments == segments and found.plan.offload.activations == 0


def test_a_plan_with_shares_has_nothing_to_find(fit):
    with pytest.raises(PlanError, match="'auto' is off, so there is nothing to find"):
        fit(tiny(parameters=1.0))


def test_of_what_several_devices_hold_each_counts_its_part(fit, devices):
    config = tiny(device_gb=1.0)
    whole, parts = (
        fitting.Trial(
            lambda plan, n=n: task_step(task_of(config), plan, devices[:n]),
            tiny(**EVERYTHING).plan,
            task_of(config).shapes,
            None,
        )
        for n in (1, 2)
    )
    assert {name: 2 * size for name, size in parts.host_arrays().items()} == whole.host_arrays()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("fitting") / "text")


AUTO = ("--plan.offload=auto", "--plan.segments.0.remat=full", "--plan.offload.host_gb=1")


def test_a_run_trains_resumes_and_says_what_it_chose(text, tmp_path):
    out = tmp_path / "run"
    words = ("--steps=4", f"--out={out}", *AUTO)
    first = run(*words, "--plan.offload.device_gb=0.03", text=text, log=tmp_path / "log")
    assert first.code == 0, first.errors
    assert "plan.offload auto: of 2 layers the device keeps parameters of" in first.errors
    stored = json.loads((out / "run.json").read_text())["config"]["plan"]["offload"]
    assert stored["auto"] is False and stored["fused"] is True
    ran = train_config_from_json(RunFolder(path=out).config()).plan
    assert first.final["plan"] == ran.hash
    assert Checkpointer(out / "checkpoints").documents(4)["plan"] == to_json(ran)
    more = ("--steps=6", "--optimizer.schedule_steps=4", "--resume", f"--out={out}", *AUTO)
    again = run(*more, "--plan.offload.device_gb=1", text=text, log=tmp_path / "again")
    assert again.code == 0, again.errors
    assert "resumed from step 4" in again.errors and sorted(again.losses) == [5, 6]
    assert "parameters of 2, optimizer of 2, activations of 2" in again.errors
    plain = run(
        "--steps=6",
        "--optimizer.schedule_steps=4",
        f"--out={tmp_path / 'plain'}",
        text=text,
        log=tmp_path / "plain.log",
    )
    losses = {**first.losses, **again.losses}
    assert losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_run_without_a_budget_on_a_cpu_ends_in_one_sentence(text, tmp_path):
    command = ("--steps=1", f"--out={tmp_path / 'run'}", "--plan.offload=auto")
    refused = run_refused(*command, text=text, log=tmp_path / "log")
    assert refused.startswith("colossax: plan.offload.device_gb: these devices do not say")


def run_refused(*words, text, log):
    done = run(*words, text=text, log=log)
    assert done.code == 2 and done.lines == []
    return done.errors.splitlines()[-1]
