"""Experts on every mesh of eight devices, in every form and group, against one device; counted.

    python bench/expert_product.py [--out FILE] [--only MESH]

Island: every factorisation of eight over data, fsdp, expert, tensor and ring; experts split over
every set of the last three axes that are more than one device; forms `passes`, `gather` and
`capacity` with room for all rows, and `weights` where they are split over none; tokens evenly
spread, all to one expert, to a quarter of the experts, partly padding, and none real. Outputs,
gradients of tokens, experts and weights of choices, and that no row is dropped.
Stages: every such mesh with 2 or 4 stages: three steps of AdamW of a decoder of four layers with
experts. Bars are those of the tests.
One process, on eight host devices; a call goes on where the last one stopped.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import products

AXES = ("data", "fsdp", "expert", "tensor", "ring")
GROUP = ("expert", "tensor", "ring")
FORMS: dict[str, dict[str, Any]] = {"passes": {}, "gather": {}, "capacity": {"capacity": 8.0}}
"""Of experts that are split over devices; with capacity 8 a buffer takes all rows of a device."""


def islands() -> Iterator[tuple[str, Callable[[], None]]]:
    """One layer's experts by themselves."""
    from tests.oracle import factorisations
    from tests.sharding.experts.plans import loads, plan
    from tests.sharding.experts.test_island import check
    from tests.step.test_parallel_oracle import label

    for mesh in factorisations(8, AXES):
        axes = [axis for axis in GROUP if mesh[axis] > 1]
        sizes = range(1, len(axes) + 1)
        groups = [group for n in sizes for group in itertools.combinations(axes, n)]
        forms = [(group, form, more) for group in groups for form, more in FORMS.items()]
        for group, form, more in [*forms, (None, "weights", {})]:
            over = ",".join(group) if group else "none"
            asked = plan(mesh, form, over if group else None, **more)
            name = f"{label(mesh)} {form} over {over}"
            yield name, functools.partial(check, asked, *loads())


def stages() -> Iterator[tuple[str, Callable[[], None]]]:
    """Whole steps, the layers shared by stages."""
    from tests.oracle import factorisations
    from tests.step import test_experts as steps
    from tests.step.test_parallel_oracle import label

    for mesh in factorisations(8, ("stage", *AXES)):
        if mesh["stage"] in (2, 4):
            check = functools.partial(steps.assert_trains_as_one_device, steps.mesh(**mesh))
            yield f"{label(mesh)} three steps", check


def main() -> int:
    asked = products.parser(__doc__ or "", "expert_product").parse_args()
    return products.run(asked, {"benchmark": "expert_product"}, dict([*islands(), *stages()]))


if __name__ == "__main__":
    sys.exit(main())
