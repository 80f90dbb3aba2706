"""What becomes of a step's old state."""

import gc

import jax
import jax.numpy as jnp
import pytest

from colossax.train.donation import PartlyDonated

SIZE = 1 << 16
READ = {"step": False, "stack": True, "other": False}


@pytest.fixture
def step():
    def pure(state, batch):
        new = {name: x + batch["add"] for name, x in state.items()}
        return new, new["stack"].sum()

    return PartlyDonated(pure, READ)


def fresh():
    return {"step": jnp.int32(0), "stack": jnp.ones(SIZE), "other": jnp.ones(SIZE)}


def test_the_old_state_is_gone_and_the_new_one_is_right(step):
    state = fresh()
    new, total = step(state, {"add": jnp.int32(2)})
    assert all(x.is_deleted() for x in state.values())
    assert total == 3 * SIZE
    assert (int(new["step"]), float(new["other"][0])) == (2, 3.0)


def test_what_is_read_lends_no_buffer(step):
    """Of three arrays the two that are not read until the end do."""
    stats = step.lower(fresh(), {"add": jnp.int32(2)}).compile().memory_analysis()
    assert stats.alias_size_in_bytes == 4 * SIZE + 4
    traced = step.trace(fresh(), {"add": jnp.int32(2)}).lower().compile().memory_analysis()
    assert traced.alias_size_in_bytes == stats.alias_size_in_bytes


def test_steps_that_are_not_waited_for_leave_one_state(step):
    first = state = fresh()
    for _ in range(5):
        state, _ = step(state, {"add": jnp.int32(1)})
    gc.collect()
    alive = [x for x in jax.live_arrays() if x.shape == (SIZE,)]
    assert len(alive) == 2
    assert first["stack"].is_deleted()
    assert float(state["stack"][-1]) == 6.0
