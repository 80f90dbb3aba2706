"""Names found for Llama, GPT-J, T5 and OPT split what those split that one writes by hand."""

import itertools

import jax
import pytest

from colossax import Plan
from colossax.nn import describe, named
from colossax.sharding import param_sharding, use
from tests.cases import quick_first
from tests.nn.plain_families import FAMILIES, HAND

MESHES = {
    "mixed": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp": {"fsdp": 8},
    "tensor": {"tensor": 8},
}


def placed(family, mesh, dims=None):
    """Of each parameter, at rest and computed with."""
    bound = Plan(mesh=mesh).bind(jax.devices())
    with use(bound):
        spec = named(describe(FAMILIES[family]), bound, dims)
    return {
        info.path: [param_sharding(bound, at, info).spec for at in ("params", "weights")]
        for info in jax.tree.leaves(spec.infos)
    }


@pytest.mark.catches("biases-turned")
@pytest.mark.catches("tables-of-heads-as-words")
@pytest.mark.catches("position-tables-as-words")
@pytest.mark.parametrize("family, mesh", quick_first(itertools.product(FAMILIES, MESHES), 4))
def test_all_is_split_as_by_hand(family, mesh):
    assert placed(family, MESHES[mesh]) == placed(family, MESHES[mesh], HAND[family])
