"""Fields that hold one of several configurations, and what JSON says of them."""

import dataclasses

import pytest

from colossax.config import check_types, from_json, to_json
from colossax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wide:
    size: float
    list: tuple[float, ...] = ()
    more: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrow:
    size: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    form: Wide | Narrow | None = None

    def __post_init__(self):
        check_types(self, "owner")


@pytest.mark.catches("first-that-fits")
@pytest.mark.parametrize("form", [None, Narrow(size=2.0), Wide(size=2.0, list=(1.0, 3.0))])
def test_each_form_is_read_as_it_was_written(form):
    assert from_json(Owner, to_json(Owner(form=form)), where="owner") == Owner(form=form)


def test_fields_that_only_one_has_say_which_it_is():
    assert from_json(Owner, {"form": {"size": 1, "more": 2}}, where="owner").form == Wide(
        size=1.0, more=2.0
    )


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            {"sise": 2.0},
            "owner.form: nothing has the fields sise; give those of: list, more",
        ),
        ({"size": "2"}, "owner.form.size: expected float, found '2'"),
        ({"size": 1.0, "list": ["a"]}, r"owner.form.list\[0\]: expected float, found 'a'"),
        (3, "owner.form: expected Wide, found 3"),
    ],
)
def test_other_forms_are_refused(form, message):
    with pytest.raises(InputError, match=message):
        from_json(Owner, {"form": form}, where="owner")
