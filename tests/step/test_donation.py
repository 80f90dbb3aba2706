"""What becomes of a step's old state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.step.donation import PartlyDonated

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


def test_a_step_waits_for_the_one_before(step, monkeypatch):
    """Its old arrays are held until then; with them there would be three."""
    waited, plain = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(x) or plain(x))
    state = fresh()
    for number in range(3):
        given = state["step"]
        state, _ = step(state, {"add": jnp.int32(1)})
        assert [x is given for x in waited] == [False] * number + [True]
    assert float(state["stack"][-1]) == 4.0


def test_host_arrays_and_traces_are_taken_too(step):
    state = {name: np.asarray(x) for name, x in fresh().items()}
    new, total = step(state, {"add": jnp.int32(2)})
    assert (float(new["stack"][0]), total) == (3.0, 3 * SIZE)
    shapes, _ = jax.eval_shape(step, new, {"add": jnp.int32(2)})
    assert shapes["stack"].shape == (SIZE,) and not new["stack"].is_deleted()
    again, _ = jax.jit(step)(new, {"add": jnp.int32(2)})
    assert float(again["stack"][0]) == 5.0


def test_the_compiled_form_takes_the_parts(step):
    state, batch = fresh(), {"add": jnp.int32(2)}
    new, _ = step.lower(state, batch).compile()(*step.divided(state), batch)
    assert float(new["stack"][0]) == 3.0
