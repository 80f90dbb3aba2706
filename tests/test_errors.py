"""What a caller may catch."""

import inspect

import pytest

from colossax import errors

KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if not issubclass(kind, Warning)
]


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_users_input_causes_is_one_kind_of_error(kind):
    """The command line tells it in one sentence and ends with 2; programs may know `ValueError`."""
    assert issubclass(kind, errors.InputError) and issubclass(kind, ValueError)


@pytest.mark.catches("damaged-store-is-input")
def test_a_damaged_store_is_caught_with_what_else_the_disk_refuses():
    with pytest.raises(errors.OffloadError, match="record 3 is damaged") as caught:
        raise errors.DamagedStoreError("record 3 is damaged", path="here", record=3, epoch=7)
    assert (caught.value.path, caught.value.record, caught.value.epoch) == ("here", 3, 7)
