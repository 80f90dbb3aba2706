"""Forms that a model's matrices may be kept in to generate with, as one asks for them."""

import dataclasses
import re

from colossax.errors import InputError
from colossax.nn.quantised.groups import GROUP

EIGHT_BITS = ("int8", "fp8")
IN_GROUPS = ("int4", "int4-sym")
KEPT = "kept"
"""In the codes of the folder that the checkpoint was imported from."""

SPARSE = ("2:4", "1:4")
SERVED = ("own", *EIGHT_BITS, "nf4", *IN_GROUPS, KEPT, *SPARSE)
"""How matrices may be kept that a model generates with."""

_ASKED = re.compile(r"(int4(?:-sym)?):([1-9]\d{0,5})")


@dataclasses.dataclass(frozen=True)
class Form:
    """What is asked for.

    Attributes:
        name: One of `SERVED`.
        group: Of `int4` and `int4-sym`, inputs that share a scale; 0 of others.
    """

    name: str
    group: int = 0

    @property
    def kept(self) -> int:
        """Of sparse forms, how many of four inputs are kept; 0 of others."""
        return int(self.name[0]) if self.name in SPARSE else 0


def form_of(asked: str) -> Form:
    """What a form's name stands for; groups of four bits may say their size, as `int4:64`.

    Raises:
        InputError: It is none of `SERVED`, or groups are of an odd size.
    """
    found = _ASKED.fullmatch(asked)
    name, group = (found[1], int(found[2])) if found else (asked, GROUP)
    if name not in SERVED:
        raise InputError(
            f"weights: found '{asked}'; give {', '.join(SERVED[:-1])} or {SERVED[-1]}; groups of"
            f" int4 have {GROUP} inputs, or as many as int4:64 says"
        )
    if name not in IN_GROUPS:
        return Form(name)
    if group % 2:
        raise InputError(
            f"weights: {asked} asks for groups of {group} inputs, two of which share a byte; give"
            " an even number"
        )
    return Form(name, group)


def check_form(asked: str, *, outliers: bool = False) -> None:
    """Refuse a form that there is none of, or one beside which no outliers are kept.

    Raises:
        InputError: As `form_of`; or they are asked for, and it is not of eight bits.
    """
    if form_of(asked).name not in EIGHT_BITS and outliers:
        raise InputError(
            f"outliers: they are kept beside int8 and fp8, and weights are {asked}; give weights"
            " int8, or leave outliers out"
        )
