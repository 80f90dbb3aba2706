"""Batches brought into the order of a plan: what moves, what is added, what is refused."""

import jax
import numpy as np
import optax
import pytest

from colossax.config import AttentionConfig, BatchConfig, Plan, preset
from colossax.errors import InputError, PlanError
from colossax.models import maker
from colossax.planner import build_step
from colossax.sharding import RowOrder
from colossax.step import any_order
from colossax.step.arrange import Arranged, arranged, row_length
from colossax.tasks import next_token_loss
from tests.step.test_step import CONFIG, text_batch

DIMS = dict.fromkeys(("tokens", "segments", "weights"), ("batch", "seq")) | {"row": ("batch",)}


def rows(length):
    tokens = np.arange(2 * length, dtype=np.int32).reshape(2, length)
    return {"tokens": tokens, "weights": np.ones((2, length), np.float32), "row": np.arange(2)}


def step_of(plan, loss=None):
    return build_step(maker(CONFIG), optax.sgd(1.0), loss or next_token_loss(), plan)


def test_devices_of_a_ring_hold_a_chunk_from_each_end():
    found = arranged(rows(16), DIMS, RowOrder(ranks=4))
    held = found["tokens"].reshape(2, 4, 4)[0]
    np.testing.assert_array_equal(
        held, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    )
    np.testing.assert_array_equal(found["row"], [0, 1])
    assert "segments" not in found


@pytest.mark.catches("padding-weighs")
def test_padding_is_marked_and_weighs_nothing():
    found = arranged(rows(13), DIMS, RowOrder(ranks=4, padding=3))
    padding = found["segments"] == -1
    assert padding.sum() == 2 * 3
    assert found["weights"][padding].sum() == 0
    assert found["weights"].sum() == 2 * 13
    assert found["tokens"].shape == (2, 16)


def test_what_cannot_be_marked_is_refused():
    with pytest.raises(InputError, match="rows need 3 more tokens"):
        arranged({"frames": np.zeros((2, 13))}, {"frames": ("batch", "seq")}, RowOrder(padding=3))


def test_lengths_that_differ_have_no_order():
    batch = {**rows(8), "tokens": np.zeros((2, 4), np.int32)}
    assert row_length(batch, DIMS) is None


def test_an_arranged_batch_stays_one_through_jit(devices):
    order = RowOrder(ranks=4)
    found = jax.jit(lambda batch: batch)(arranged(rows(16), DIMS, order))
    assert isinstance(found, Arranged) and found.order == order


@pytest.mark.catches("text-dims")
def test_host_arrays_are_arranged_once_and_only_for_losses_that_say_so(devices):
    plan = preset("ring", mesh={"ring": 4, "data": 2})
    batch = text_batch()
    placed = step_of(plan).place(batch)
    assert isinstance(placed, Arranged)
    assert step_of(plan).place(placed) is placed
    place = placed.order.indices(16)
    for name, values in batch.items():
        np.testing.assert_array_equal(placed[name], values[:, place], err_msg=name)

    def own(model, batch):
        return next_token_loss()(model, batch)

    natural = step_of(plan, own).place(batch)
    assert not isinstance(natural, Arranged)
    np.testing.assert_array_equal(natural["tokens"], batch["tokens"])
    assert isinstance(step_of(plan, any_order(own)).place(batch), Arranged)


def test_the_plain_ring_keeps_rows_as_they_are(devices):
    plan = preset("ring").replace(attention=AttentionConfig(scheme="ring"))
    assert not isinstance(step_of(plan).place(text_batch()), Arranged)


def test_a_row_shorter_than_its_chunks_is_refused(devices):
    with pytest.raises(PlanError, match=r"row of 8 tokens is cut into 16 chunks \(ring=8\)"):
        step_of(preset("ring")).place(text_batch(seq=8))


def test_whole_gradients_cannot_be_accumulated_where_no_device_has_them(devices):
    plan = preset("zero1", mesh={"row": 2, "col": 4}, batch=BatchConfig(accumulation=2))
    with pytest.raises(PlanError, match="plan.batch.reduce_once: .* is split over 'row'"):
        step_of(plan.replace(tensor_layout="2d"))


def test_a_step_on_one_device_has_no_order(devices):
    assert step_of(Plan(mesh={"fsdp": 8})).order(13) == RowOrder()
