"""Fresh parameters are the same bits on every mesh, in every segment and memory."""

import jax
import numpy as np
import pytest

from colossax.config import OffloadConfig, Plan, Precision, Segment, preset
from colossax.models import LlamaConfig, maker
from colossax.nn import describe, initialise
from colossax.sharding import param_sharding, use
from tests.fresh import fresh_params

CONFIG = LlamaConfig(vocab=64, embed=32, layers=3, heads=8, kv_heads=4, mlp=48, max_seq=32)
PLANS = {
    "segments in host memory": preset(
        "zero3+megatron_sp",
        mesh={"fsdp": 2, "tensor": 4},
        segments=(Segment(count=1), Segment()),
        offload=OffloadConfig(parameters=0.5),
    ),
    "bfloat16 in 2.5d": Plan(
        mesh={"depth": 2, "row": 2, "col": 2},
        tensor_layout="2.5d",
        precision=Precision(params="bfloat16"),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_changes_no_bit_of_what_is_drawn(devices, name):
    bound, key = PLANS[name].bind(devices), jax.random.key(3)
    with use(bound):
        spec = describe(maker(CONFIG))
    found = initialise(spec, bound, key)
    wanted = fresh_params(CONFIG, spec, bound, key)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    for leaf, info in zip(jax.tree.leaves(found), jax.tree.leaves(spec.infos), strict=True):
        assert leaf.sharding == param_sharding(bound, "params", info), info.path
        assert leaf.dtype == bound.plan.precision.params
