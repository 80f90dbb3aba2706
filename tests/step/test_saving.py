"""States saved and restored by a loop of one's own."""

import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from colossax.config import Plan
from colossax.errors import CheckpointError, InputError
from colossax.models import LlamaConfig, maker
from colossax.planner import boost, build_step
from colossax.sharding import explain, explain_html
from colossax.tasks import next_token_loss

CONFIG = LlamaConfig(vocab=16, embed=8, layers=2, heads=2, kv_heads=1, mlp=8, max_seq=8)
MESHES = [{"data": 1}, {"fsdp": 2, "tensor": 2}, {"fsdp": 4, "ring": 2}]
GUIDE = Path(__file__).parents[2] / "docs" / "own_loop.md"


def parts(mesh, **options):
    plan = Plan(mesh=mesh, **options)
    devices = jax.devices()[: plan.bind(jax.devices()[: np.prod(list(mesh.values()))]).mesh.size]
    return (maker(CONFIG), optax.adamw(1e-2), next_token_loss(), plan), {"devices": devices}


def made(mesh, **options):
    given, where = parts(mesh, **options)
    return boost(*given, **where)


def text(seed=0):
    tokens = np.random.default_rng(seed).integers(0, 16, (8, 9)).astype(np.int32)
    ones = np.ones((8, 8), np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": ones,
        "positions": np.tile(np.arange(8, dtype=np.int32), (8, 1)),
        "weights": ones.astype(np.float32),
    }


def equal(one, other):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *(one, other)
    )


@pytest.fixture(scope="module")
def trained():
    """A step on eight devices and its state after a step."""
    state, step = made(MESHES[-1])
    return step(state, text())[0], step


@pytest.mark.catches("own-save-of-another-state")
@pytest.mark.catches("own-save-wrong-folder")
@pytest.mark.parametrize("mesh", MESHES)
def test_a_saved_state_goes_on_on_any_mesh(mesh, trained, tmp_path):
    state, step = trained
    assert step.save(tmp_path, state).path == tmp_path / "1"
    given, where = parts(mesh)
    other = build_step(*given, **where)
    restored = other.restore(tmp_path)
    equal(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == other.shardings
    state, metrics = other(restored, text(1))
    _, expected = step(jax.tree.map(lambda x: x.copy(), trained[0]), text(1))
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)


def test_a_save_beside_training_holds_the_state_that_was_given(tmp_path):
    state, step = made({"fsdp": 2})
    kept = jax.tree.map(np.array, state)
    saving = step.save(tmp_path, state, wait=False)
    state, _ = step(state, text())
    saves = [saving, step.save(tmp_path, state, wait=False)]
    assert [saving.wait().name for saving in saves] == ["0", "1"]
    equal(step.restore(tmp_path, at=0), kept)
    equal(step.restore(tmp_path), state)


@pytest.mark.catches("own-restore-does-not-wait")
def test_a_restore_waits_for_what_is_being_saved(trained, tmp_path):
    state, step = trained
    step.save(tmp_path, state, wait=False)
    equal(step.restore(tmp_path), state)


@pytest.mark.catches("own-saves-kept")
def test_as_many_are_kept_as_asked(tmp_path):
    state, step = made({"fsdp": 2})
    for _ in range(3):
        step.save(tmp_path, state, keep=2)
        state, _ = step(state, text())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["1", "2"]


@pytest.mark.catches("own-save-twice")
def test_a_step_count_that_is_there_is_refused(trained, tmp_path):
    state, step = trained
    step.save(tmp_path, state)
    with pytest.raises(CheckpointError, match="after 1 steps is there already; delete it, or save"):
        step.save(tmp_path, state)


@pytest.mark.catches("own-save-failure-lost")
def test_a_save_that_fails_says_so_and_leaves_nothing(trained, tmp_path, monkeypatch):
    state, step = trained

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("colossax.checkpoint.writing.ArraysJob.write", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            step.save(tmp_path, state)
        step.save(tmp_path, state, wait=False)
    with pytest.raises(CheckpointError, match="No space left on device"):
        step.save(tmp_path, state)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    step.save(tmp_path, state)
    equal(step.restore(tmp_path), state)


def test_what_cannot_be_saved_or_restored_is_refused_in_one_sentence(tmp_path):
    state, step = made({"fsdp": 2})
    with pytest.raises(CheckpointError, match="does not exist; give the directory"):
        step.restore(tmp_path / "nothing")
    old, (state, _) = state, step(state, text())
    with pytest.raises(InputError, match="was given up to an earlier call"):
        step.save(tmp_path, old)
    step.save(tmp_path, state)
    with pytest.raises(CheckpointError, match="no step 7; choose one of 1"):
        step.restore(tmp_path, at=7)
    given, where = parts({"fsdp": 2})
    plain, other = boost(given[0], optax.sgd(1e-2), *given[2:], **where)
    other.save(tmp_path / "sgd", plain)
    with pytest.raises(CheckpointError, match="optimizer"):
        step.restore(tmp_path / "sgd")


@pytest.mark.catches("step-unshown")
def test_a_step_shows_where_everything_lives(trained):
    _, step = trained
    assert repr(step) == explain(step.bound, step.spec.infos)
    assert "layers/attn/q/w" in repr(step) and repr(step).startswith("plan ")
    assert step._repr_html_() == explain_html(step.bound, step.spec.infos)


def snippets():
    """Python of the page on loops of one's own, from where the loop is written out."""
    written_out = GUIDE.read_text().partition("## The loop written out")[2]
    return re.findall(r"```python\n(.*?)```", written_out, re.DOTALL)


@pytest.mark.catches("own-manager-layout")
def test_the_loop_that_the_page_writes_out_runs(tmp_path):
    given, where = parts({"fsdp": 2, "tensor": 2})
    make_model, optimizer, loss, plan = given
    smaller = Plan(mesh={"fsdp": 2})
    scope = {
        "make_model": make_model, "optimizer": optimizer, "loss": loss, "plan": plan,
        "other_plan": smaller, "batches": [text(i) for i in range(4)], "folder": tmp_path / "own",
        "managed": tmp_path / "managed", "devices": where["devices"],
        "fewer_devices": jax.devices()[:2],
    }  # fmt: skip
    for code in snippets():
        exec(code, scope)
    equal(scope["restored"], scope["state"])
    equal(scope["from_manager"], scope["state"])
    assert scope["from_manager"]["params"]["embed"]["table"].sharding.mesh.size == 2
    assert int(scope["state"]["step"]) == 4
