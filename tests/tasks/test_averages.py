"""Averages that a run's optimizer keeps: they are what is validated, and exported if asked."""

import dataclasses

import numpy as np
import pytest

from colossax import Plan
from colossax.checkpoint import find_checkpoint
from colossax.cli import main
from colossax.config import OffloadConfig
from colossax.errors import InputError
from colossax.models.parameters import params_of_checkpoint
from colossax.recipes import recipe
from colossax.tasks import task_of
from tests.cases import quick_first
from tests.launching import write_text
from tests.tasks.small_text import changed, ran, smaller

TINY = {
    "model": {"vocab": 300, "embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 48},
    "data": {"tokenizer_vocab": 300, "seq_len": 32, "global_batch": 8, "validation_batches": 2},
    "sample": {"prompt": ""},
}
KINDS = {
    "ema": {"ema": 0.6, "peak_lr": 0.02, "warmup": 0},
    "schedule free": {
        "name": "schedule_free",
        "schedule": "constant",
        "peak_lr": 0.02,
        "warmup": 0,
    },
}


def small(folder, **optimizer):
    """Four steps on four of the eight devices, a checkpoint after each."""
    config = smaller(recipe("llama_tiny"), TINY).replace(
        steps=4,
        validate_every=4,
        checkpoint_every=1,
        keep=9,
        plan=Plan(mesh={"fsdp": 2, "tensor": 4}),
    )
    path = str(write_text(folder / "text"))
    return changed(changed(config, "data", path=path), "optimizer", **optimizer)


def exported(run, out, *more):
    assert main(["export", str(run), str(out), "--as-checkpoint", *more]) == 0
    return params_of_checkpoint(find_checkpoint(out))


def numbers(params):
    return {path: params.read(path, *at, None) for path, at in places(params)}


def places(params):
    for path, info in params.infos.items():
        yield path, ((None,) if info.first_layer is None else (info.first_layer + 1,))


@pytest.mark.catches("trained-parameters-judged")
@pytest.mark.catches("schedule-free-export")
@pytest.mark.parametrize("kind", quick_first(KINDS, ["schedule free"]))
def test_the_averages_are_what_is_validated_and_exported(tmp_path, kind):
    config = small(tmp_path, **KINDS[kind])
    final = ran(config, tmp_path / "run")
    averages, plain = (
        exported(tmp_path / "run", tmp_path / name, *more)
        for name, more in {"averages": ["--averaged"], "plain": []}.items()
    )
    found, trained = numbers(averages), numbers(plain)
    assert any(np.abs(found[path] - trained[path]).max() > 1e-3 for path in found)
    # A step at a rate of nothing tells what those that were exported are worth.
    stays = changed(config, "optimizer", ema=None, name="adamw", peak_lr=0.0)
    stays = stays.replace(steps=1, validate_every=1, plan=Plan())
    for name, same in (("averages", True), ("plain", False)):
        there = ran(stays.replace(init=str(tmp_path / name)), tmp_path / f"from {name}")
        loss = there["validation_loss"]
        assert (abs(loss - final["validation_loss"]) < 2e-5 * loss) is same


@pytest.mark.catches("ema-export-of-parameters")
def test_an_exported_average_is_the_sum_of_its_steps(tmp_path):
    ran(small(tmp_path, **KINDS["ema"]), tmp_path / "run")
    before, now = (
        numbers(exported(tmp_path / "run", tmp_path / f"at {step}", "--averaged", "--step", step))
        for step in ("3", "4")
    )
    moved = numbers(exported(tmp_path / "run", tmp_path / "moved", "--step", "4"))
    for path, average in now.items():
        wanted = 0.6 * before[path].astype(np.float64) + 0.4 * moved[path]
        np.testing.assert_allclose(average, wanted, atol=1e-6)


@pytest.mark.catches("averages-of-all-or-none")
def test_what_does_not_learn_is_exported_as_it_is(tmp_path):
    config = small(tmp_path, **KINDS["ema"]).replace(steps=2)
    task = task_of(config)
    options = dataclasses.replace(task.options, trainable=lambda info: "mlp/" in info.path)
    ran(config, tmp_path / "run", task=dataclasses.replace(task, options=options))
    averages, plain = (
        numbers(exported(tmp_path / "run", tmp_path / name, *more))
        for name, more in {"averages": ["--averaged"], "plain": []}.items()
    )
    for path, average in averages.items():
        assert (np.abs(average - plain[path]).max() > 0) == ("mlp/" in path), path


def test_a_run_without_averages_has_none_to_export(tmp_path, capsys):
    ran(small(tmp_path, ema=None).replace(steps=1), tmp_path / "run")
    words = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--averaged"]
    assert main(words) == 2
    assert (
        "keeps none; leave --averaged out, or train with --optimizer.ema" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.catches("averages-are-no-identity")
def test_a_run_is_not_resumed_with_another_average(tmp_path):
    config = small(tmp_path, **KINDS["ema"]).replace(steps=1)
    ran(config, tmp_path / "run")
    with pytest.raises(
        InputError, match="--resume: optimizer.ema is 0.6 in .* and none here; resum"
    ):
        ran(changed(config, "optimizer", ema=None), tmp_path / "run", resume="auto")


def test_averages_on_disk_are_refused():
    config = recipe("llama_tiny")
    plan = Plan(offload=OffloadConfig(optimizer=1.0, disk=1.0))
    with pytest.raises(
        InputError, match="plan.offload.disk: the optimizer's averages of parameters"
    ):
        changed(config, "optimizer", ema=0.9).replace(plan=plan)
    with pytest.raises(InputError, match="optimizer.ema: found 1.0; give 0 or more, below 1"):
        changed(config, "optimizer", ema=1.0)
