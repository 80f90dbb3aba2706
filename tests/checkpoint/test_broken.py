"""Steps that are no longer whole are named and moved aside, and nothing of them is deleted."""

import shutil
import threading

import jax.numpy as jnp
import pytest

from colossax.checkpoint import Checkpointer, RecordReader, folder
from colossax.checkpoint.broken import broken_steps, move_aside
from colossax.errors import CheckpointError, CheckpointWarning
from tests.checkpoint.support import plain


@pytest.fixture
def steps(devices, tmp_path):
    """Steps 1 to 3."""
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, [(plain("model/params/w", (4,)), jnp.ones(4))], {})
    return tmp_path


def test_what_is_missing_is_said(steps):
    assert broken_steps(steps) == {} and broken_steps(steps / "none") == {}
    (steps / "2/arrays/manifest.json").unlink()
    shutil.rmtree(steps / "3/arrays")
    (steps / "4").write_text("x")
    for other in ("03", "٣", "5.broken", "6.orbax-checkpoint-tmp", "notes"):
        (steps / other).mkdir()
    assert broken_steps(steps) == {
        2: "'arrays/manifest.json' is missing in it",
        3: "'arrays' is missing in it",
        4: "it is no folder",
    }
    assert Checkpointer(steps).steps() == [1]
    assert RecordReader(steps).chosen == (
        f"step 1 of {steps}; step 2 is broken: 'arrays/manifest.json' is missing in it;"
        " step 3 is broken: 'arrays' is missing in it; step 4 is broken: it is no folder"
    )
    assert [move_aside(steps, 2).name, move_aside(steps, 3).name] == ["2.broken", "3.broken"]
    (steps / "2").mkdir()
    assert move_aside(steps, 2).name == "2.broken-2"


@pytest.mark.catches("broken-step-in-the-way")
@pytest.mark.parametrize("lost", ["arrays/manifest.json", "arrays"])
def test_a_broken_step_is_saved_anew_and_kept_beside(steps, lost):
    path = steps / "3" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    left = sorted(file.relative_to(steps / "3") for file in (steps / "3").rglob("*"))
    said = pytest.warns(CheckpointWarning, match=r"step 3 is broken .*; it was moved to '3.broken'")
    with said, Checkpointer(steps, keep=None) as checkpointer:
        assert checkpointer.save(3, [(plain("model/params/w", (4,)), jnp.ones(4))], {"new": 1})
    assert Checkpointer(steps).steps() == [1, 2, 3]
    assert Checkpointer(steps).documents(3) == {"new": 1}
    moved = steps / "3.broken"
    assert sorted(file.relative_to(moved) for file in moved.rglob("*")) == left


@pytest.mark.catches("deleted-is-damaged")
def test_a_step_that_is_deleted_while_it_is_read_is_no_damaged_one(steps, monkeypatch):
    """As a run does that goes on; other files may go before the manifest."""
    monkeypatch.setattr(folder, "_DELETING_S", 0.3)
    for step, late in ((1, True), (2, False)):
        reader = RecordReader(steps, step)
        shutil.rmtree(steps / f"{step}/arrays/model")
        delete = threading.Timer(0.1, shutil.rmtree, [steps / str(step)])
        if late:
            delete.start()
        with pytest.raises(CheckpointError) as told:
            reader.read("model/params/w")
        expected = "was deleted while it was read" if late else "is damaged: record"
        assert f"checkpoint '{steps}' step {step} {expected}" in str(told.value)
        if late:
            assert str(told.value).endswith("; read step 3, or start again")
            delete.join()
