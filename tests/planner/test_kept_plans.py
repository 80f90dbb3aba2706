"""What was compiled once: read where all that decides it is the same, and nowhere else."""

import dataclasses
import os
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from colossax.aot import parse_target
from colossax.aot.kept_kernels import kept_kernels
from colossax.config import Plan
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Subject, kept, plan_run, planned, predict, verifying
from colossax.planner.searching.verifying import compiled
from colossax.recipes import recipe
from colossax.tasks import Task, task_of
from tests.cases import quick_first

TARGET = parse_target("h100:1x2")


class Compiler:
    """Stands for compilations: formulas, with more beside."""

    def __init__(self, profile):
        self.profile, self.plans, self.kernels = profile, [], []
        self.refused = None

    def __call__(self, subject, plans, target, processes):
        with kept_kernels(target.gpu, Path("/nowhere")) as options:
            self.kernels.append(bool(options))
        return [self.one(plan, target) for plan in plans]

    def one(self, plan, target):
        self.plans.append(plan)
        if plan == self.refused:
            return {"refused": "this plan is not for this model"}
        total = 1.05 * predict(self.profile, plan, target).bytes.total
        return {
            "device_bytes": {"total": total, "terms": {"all": total}},
            "host_bytes": 0,
            "collectives": [{"seconds": 0.5, "exposed_s": 0.1}],
        }


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A recipe, what stands for its compiler, and the folder that things are kept in."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))
    config = recipe("llama_tiny")
    profile = profile_task(task_of(config), config.plan, TARGET)
    compiler = Compiler(profile)
    monkeypatch.setattr(verifying, "_compiled", compiler)
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    monkeypatch.setattr(planned, "target_devices", lambda _: [])
    return config, compiler, tmp_path / "plans"


def ask(config, **changes):
    subject = Subject.of(config, fresh=changes.pop("fresh", False))
    lines = []
    answer = plan_run(
        subject, config.plan, TARGET, top=2, processes=1, tell=lines.append, **changes
    )
    return answer, lines


@pytest.mark.catches("compiled-again")
@pytest.mark.catches("refusals-are-kept")
def test_a_second_search_compiles_nothing_and_says_the_same(tiny):
    config, compiler, folder = tiny
    fresh, _ = ask(config, fresh=True)
    compiler.refused = fresh.plans[0].plan
    compiler.plans.clear()
    first, _ = ask(config)
    tried = len(compiler.plans)
    assert compiler.plans.count(compiler.refused) == 1
    assert first.compiled == tried - 1 == len(list(folder.glob("*.json"))) > 0
    second, lines = ask(config)
    assert compiler.plans[tried:] == [compiler.refused]
    assert second.compiled == 0
    assert any("were compiled before" in line for line in lines)
    assert [one.to_json() for one in second.plans] == [one.to_json() for one in first.plans]


@pytest.mark.catches("fresh-is-read")
@pytest.mark.catches("fresh-takes-kernels")
def test_fresh_searches_neither_read_nor_keep(tiny):
    config, compiler, folder = tiny
    first, _ = ask(config, fresh=True)
    assert not folder.exists()
    assert not any(compiler.kernels)
    compiler.kernels.clear()
    ask(config)
    assert all(compiler.kernels)
    compiler.kernels.clear()
    count = len(compiler.plans)
    second, _ = ask(config, fresh=True)
    assert len(compiler.plans) - count == count // 2
    assert second.compiled == first.compiled > 0
    assert not any(compiler.kernels)


@pytest.mark.catches("fresh-takes-kernels")
@pytest.mark.parametrize("fresh", [False, True])
def test_children_of_fresh_searches_compile_anew(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))
    monkeypatch.delenv("COLOSSAX_KEPT_KERNELS", raising=False)
    given, config = [], recipe("llama_tiny")

    def run(words, **_):
        given.append(os.environ.get("COLOSSAX_KEPT_KERNELS"))
        return types.SimpleNamespace(returncode=0, stdout="{}", stderr="")

    monkeypatch.setattr(verifying.subprocess, "run", run)
    plans = [config.plan.replace(mesh={axis: 2}) for axis in ("data", "fsdp")]
    compiled(Subject.of(config, fresh=fresh), plans, TARGET, processes=2)
    assert given == ["none" if fresh else None] * 2
    assert "COLOSSAX_KEPT_KERNELS" not in os.environ


DAMAGED = (
    "",
    "{",
    "[]",
    "{}",
    '{"format": 0}',
    '{"format": 1, "found": {}}',
    '{"format": 1, "found": {"device_bytes": {"total": "1"}, "collectives": []}}',
    '{"format": 1, "found": {"device_bytes": {"total": 1, "terms": 3}, "collectives": []}}',
    '{"format": 1, "found": {"device_bytes": {"total": 1, "terms": {}}, "collectives": [3]}}',
    '{"format": 1, "found": {"device_bytes": {"total": 1, "terms": {}}, "collectives": []}}',
    '{"format": 1, "found": {"device_bytes": {"total": 1, "terms": {}}, "collectives": [],'
    ' "host_bytes": 0, "host_traffic": {"by_direction": [{"bytes": 1}]}}}',
)


@pytest.mark.parametrize("text", quick_first(DAMAGED, 9))
@pytest.mark.catches("damage-is-believed")
def test_what_is_damaged_is_compiled_again_and_mended(tiny, text):
    config, compiler, folder = tiny
    first, _ = ask(config)
    whole = {path: path.read_text("utf-8") for path in folder.glob("*.json")}
    for path in whole:
        path.write_text(text, "utf-8")
    second, _ = ask(config)
    assert second.compiled == first.compiled
    assert {path: path.read_text("utf-8") for path in folder.glob("*.json")} == whole


def test_a_folder_that_cannot_be_written_is_done_without(tiny):
    config, _, folder = tiny
    folder.write_text("a file is in its place", "utf-8")
    assert ask(config)[0].plans


def entry(config, target=TARGET):
    return kept.entry_of(task_of(config), config, config.plan, target)


@pytest.mark.catches("another-source-is-trusted")
def test_whatever_decides_a_program_names_its_file(tiny, monkeypatch):
    config, *_ = tiny
    names = [entry(config)]
    assert entry(config) == names[0]
    data = dataclasses.replace(config.data, global_batch=2 * config.data.global_batch)
    names.append(entry(config.replace(data=data)))
    names.append(entry(config.replace(plan=config.plan.replace(mesh={"fsdp": 2}))))
    names.append(entry(config.replace(model=dataclasses.replace(config.model, layers=1))))
    names.append(entry(config.replace(clip_norm=0.5)))
    names += [entry(config, parse_target(name)) for name in ("h100:2x1", "a100:1x2")]
    names.append(entry(config, parse_target("h100:1x2", network="ethernet")))
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_source", lambda: "edited")
        names.append(entry(config))
    with monkeypatch.context() as patch:
        patch.setattr(kept, "version_of", lambda name: "another" if name == "jaxlib" else "")
        names.append(entry(config))
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_dump_to=nowhere")
        names.append(entry(config))
    with monkeypatch.context() as patch:
        patch.setattr(kept, "cudnn_installed", lambda: "another")
        names.append(entry(config))
    assert len(set(names)) == len(names)


def test_the_source_is_all_of_the_library_and_what_it_reads(tmp_path, monkeypatch):
    package = tmp_path / "colossax"
    (package / "aot").mkdir(parents=True)
    (package / "__init__.py").write_text("", "utf-8")
    hashes = []
    for name, text in [("aot/a.py", "1"), ("aot/a.py", "2"), ("aot/gpus.json", "{}")]:
        (package / name).write_text(text, "utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(kept, "_PACKAGE", package)
            hashes.append(kept._source.__wrapped__())
    assert len(set(hashes)) == 3


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x, scale):
        return self.down(jax.nn.relu(scale * self.up(x)))


def own(scale):
    def loss(model, batch):
        squares = jnp.sum((model(batch["x"], scale) - batch["x"]) ** 2)
        return {"squares": (squares, jnp.float32(batch["x"].shape[0]), 1.0)}, {}

    return Task(
        name="plain",
        make_model=Plain,
        optimizer=optax.adamw(1e-3),
        loss=loss,
        shapes={"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)},
        batches=(),
        tokens=0,
        flops=0,
    )


@pytest.mark.catches("code-of-ones-own-is-not-looked-at")
def test_code_of_ones_own_is_known_by_its_program(monkeypatch):
    """Parameters and batch are the same; what is computed is not."""
    monkeypatch.setattr("colossax.planner.counting.islands.target_devices", lambda _: jax.devices())
    plan = Plan(mesh={"data": 8})
    target = parse_target("h100:1x8")
    first, same, other = (
        kept.entry_of(own(scale), None, plan, target) for scale in (2.0, 2.0, 3.0)
    )
    assert first == same
    assert first != other
