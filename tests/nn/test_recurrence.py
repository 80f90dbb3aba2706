"""A recurrence over flat tokens against a plain loop over each sequence."""

import jax
import jax.numpy as jnp
import numpy as np

from colossax.nn import FlatTokens, run_recurrence


def step(state, x):
    """Two arrays of state, one narrower than what it is computed in."""
    total = 0.5 * state["total"] + x
    return {"total": total, "seen": state["seen"] + 1}, total * state["seen"]


def flat(seat, position):
    return FlatTokens(
        **{
            n: jnp.asarray(x)
            for n, x in zip(("seat", "position", "slot"), (seat, position, position), strict=True)
        }
    )


def loop(xs):
    total, rows = 0.0, []
    for seen, x in enumerate(xs):
        total = 0.5 * total + x
        rows.append(total * seen)
    return rows


def test_tokens_of_several_seats_go_on_from_their_own_states():
    """Two sequences by turns with padding between, in the second of three layers."""
    states = {"total": jnp.full((3, 2), 7.0), "seen": jnp.full((3, 2), 5, jnp.int16)}
    xs, found = np.random.default_rng(0).normal(size=8).astype(np.float32), []
    seats, positions = [1, 0, 1, -1, 0, 1, 0, -1], [0, 0, 1, 0, 1, 2, 2, 5]
    for at in (slice(0, 3), slice(3, 8)):
        where = flat(seats[at], positions[at])
        out, states = run_recurrence(step, jnp.asarray(xs[at]), states, 1, where)
        found.append(out)
    found = np.concatenate(found)
    assert not found[np.asarray(seats) < 0].any()
    for seat in (0, 1):
        mine = np.asarray(seats) == seat
        np.testing.assert_allclose(found[mine], loop(xs[mine]), rtol=1e-6)
    assert states["seen"].dtype == jnp.int16
    assert states["seen"].tolist() == [[5, 5], [3, 3], [5, 5]]


def test_states_carried_by_a_loop_are_written_in_place():
    states = jax.ShapeDtypeStruct((32, 16, 4096), jnp.float32)
    where = flat([0, 1, 2], [0, 0, 0])

    def halved(state, x):
        return state * 0.5 + x, state + x

    def layers(x, states):
        def layer(carry, row):
            x, states = carry
            return run_recurrence(halved, x, states, row, where), None

        return jax.lax.scan(layer, (x, states), jnp.arange(32))[0]

    x = jax.ShapeDtypeStruct((3, 4096), jnp.float32)
    found = jax.jit(layers, donate_argnums=1).lower(x, states).compile().memory_analysis()
    assert found.alias_size_in_bytes == 32 * 16 * 4096 * 4
    assert found.temp_size_in_bytes < found.alias_size_in_bytes / 4
