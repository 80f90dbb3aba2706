"""What a run's checkpoints hold beside arrays, and what is refused of it."""

import jax
import numpy as np
import optax
import pytest

from colossax.checkpoint import Checkpointer
from colossax.config import Plan
from colossax.errors import CheckpointError
from colossax.models import LlamaConfig, maker
from colossax.planner import boost
from colossax.processes.group import Group
from colossax.run.checkpointing import RunCheckpoints
from colossax.run.initial import _restored
from colossax.step.saving.records import state_slots
from colossax.tasks import next_token_loss

CONFIG = LlamaConfig(vocab=16, embed=8, layers=1, heads=2, kv_heads=1, mlp=8, max_seq=8)


@pytest.fixture(scope="module")
def made():
    """A state and its step."""
    one = jax.devices()[:1]
    plan = Plan(mesh={"fsdp": 1})
    return boost(maker(CONFIG), optax.sgd(1.0), next_token_loss(), plan, devices=one)


def checkpoints(folder, step, problems, run=1):
    return RunCheckpoints(folder, step, keep=2, documents={"run": run}, report=problems.append)


@pytest.mark.sentinel
@pytest.mark.catches("checkpoint-of-any-run")
def test_a_checkpoint_of_another_run_is_refused(made, tmp_path):
    state, step = made
    who = {"seed": 0, "data": ["text.txt", "f" * 32], "model": {"embed": 8}}
    run = checkpoints(tmp_path, step, [], {"identity": who, "config": {"steps": 3}})
    run.save(state, 3)
    run.finish()
    same = {"identity": {**who, "data": ["moved.txt", "f" * 32]}, "config": {"steps": 9}}
    checkpoints(tmp_path, step, [], same).restore(3)
    for other, message in (
        ({**who, "seed": 1}, "seed is 0 there and 1 here"),
        (
            {**who, "data": ["text.txt", "e" * 32]},
            "data is 'text.txt' .f{12}. there and 'text.txt'",
        ),
        ({**who, "model": {"embed": 16}}, "model.embed is 8 there and 16 here"),
        ({**who, "more": 1}, "more is None there and 1 here"),
    ):
        with pytest.raises(CheckpointError, match=f"step 3 is of another run: {message}") as caught:
            checkpoints(tmp_path, step, [], {"identity": other, "config": {}}).restore(3)
        assert "\n" not in str(caught.value)


@pytest.mark.sentinel
@pytest.mark.catches("checkpoint-position-off-by-one")
def test_a_checkpoint_says_where_its_data_goes_on(made, tmp_path):
    state, step = made
    problems = []
    run = checkpoints(tmp_path, step, problems)
    run.save(state, 3)
    run.finish()
    assert not problems
    assert Checkpointer(tmp_path).documents(3) == {"run": 1, "position": {"batch": 3}}
    restored = run.restore(3)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


@pytest.mark.catches("checkpoint-position-not-read")
@pytest.mark.parametrize("documents", [{"position": {"batch": 2}}, {}])
def test_a_position_that_is_not_that_of_the_step_is_refused(made, tmp_path, documents):
    state, step = made
    pairs = list(zip(jax.tree.leaves(state_slots(step)), jax.tree.leaves(state), strict=True))
    with Checkpointer(tmp_path) as other:
        other.save(3, pairs, documents)
    found = documents.get("position")
    with pytest.raises(CheckpointError, match=f"step 3: found the data position {found}") as caught:
        checkpoints(tmp_path, step, []).restore(3)
    assert "after 3 steps it is {'batch': 3}; resume from another checkpoint" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.catches("damaged-step-not-passed-over")
def test_a_run_goes_on_from_the_latest_whole_step(made, tmp_path):
    state, step = made
    notes = []
    run = checkpoints(tmp_path, step, notes)
    for done in (1, 2):
        run.save(state, done)
    run.finish()
    (tmp_path / "3").mkdir()
    chunk = next(path for path in (tmp_path / "2/arrays").rglob("c/**/0") if path.is_file())
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    run.set_broken_aside()
    start, restored = _restored(Group(None, {}), run, 2)
    assert start == 1 and run.latest() == 1
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.broken", "3.broken"]
    assert "step 3 is broken ('arrays' is missing in it); it was moved to" in notes[0]
    assert "step 2 is broken (" in notes[1] and str(chunk) in notes[1]
    assert len(notes) == 2 and "\n" not in notes[0] + notes[1]


@pytest.mark.catches("last-damaged-step-moved")
def test_the_last_step_that_is_there_is_refused_and_stays(made, tmp_path):
    state, step = made
    run = checkpoints(tmp_path, step, [])
    run.save(state, 2)
    run.finish()
    (tmp_path / "2/run/metadata").write_text("{}")
    with pytest.raises(CheckpointError, match="document 'run' cannot be read"):
        _restored(Group(None, {}), run, 2)
    assert run.latest() == 2
