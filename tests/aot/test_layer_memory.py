"""What each further layer of a step costs a GPU: what it keeps, its gradient, and nothing else.

D, F, T: embed, mlp, tokens of a row. A device has one row; where `tensor` is 2, half of two.
"""

import functools

import pytest

from colossax.aot import parse_target
from colossax.config import AttentionConfig, Plan, Precision, Segment, preset
from colossax.models import LlamaConfig
from colossax.planner import inspect_run
from colossax.recipes import recipe
from colossax.tasks import DataConfig

pytestmark = pytest.mark.aot

D, F, V, T, DEVICES = 1024, 4096, 2048, 2048, 8
PARAMETERS = 3 * D * D + 3 * D * F + 2 * D
"""Of one layer; it has half as many key-value heads as heads."""
FEW, MANY = 4, 8


@functools.cache
def compiled(name, layers, matmul="auto"):
    """A step that recomputes its layers, in bfloat16; of a stack so small the head is no more."""
    tensor = 2 if "megatron" in name else 1
    chosen = preset(name, mesh={"fsdp": DEVICES // tensor, "tensor": tensor})
    plan = Plan(
        mesh=chosen.mesh,
        rules=chosen.rules,
        tensor_matmul=matmul,
        attention=AttentionConfig(kernel="xla"),
        precision=Precision(compute="bfloat16"),
        segments=(Segment(remat="full"),),
    )
    model = LlamaConfig(vocab=V, embed=D, layers=layers, heads=8, kv_heads=4, mlp=F, max_seq=T)
    data = DataConfig(seq_len=T, global_batch=DEVICES, tokenizer_vocab=V)
    config = recipe("llama_tiny").replace(model=model, plan=plan, data=data)
    return inspect_run(config, parse_target(f"h100:1x{DEVICES}"))


def each_layer(of, name, *matmul):
    """What a layer adds to the number that is `of` a program."""
    few, many = (of(compiled(name, layers, *matmul)) for layers in (FEW, MANY))
    return (many - few) / (MANY - FEW)


@pytest.mark.parametrize(
    ("which", "within"),
    [
        pytest.param(("zero3",), 0.01, id="zero3", marks=pytest.mark.catches("stacks-turned")),
        pytest.param(
            ("zero1",), 0.01, id="zero1", marks=pytest.mark.catches("gathered-beside-the-old")
        ),
        pytest.param(("zero3+megatron_sp",), 0.01, id="megatron_sp"),
        # The same arrays, in a heap packed another way.
        pytest.param(("zero3+megatron_sp", "overlap"), 0.1, id="overlap"),
    ],
)
def test_a_layer_keeps_its_input_and_its_gradient(which, within):
    """No stack is copied into another order, or gathered beside the one it takes the place of."""
    needed = 2 * T * D + 4 * PARAMETERS / DEVICES
    found = each_layer(lambda one: one.memory.temp_bytes, *which)
    assert found == pytest.approx(needed, rel=within)


@pytest.mark.catches("computed-as-at-rest")
def test_tokens_are_gathered_in_the_compute_dtype():
    """Twice forward, twice in what is recomputed, twice for gradients: two rows of two devices."""

    def gathered(one):
        sums = [link.totals for link in one.links]
        return sum(t.bytes for t in sums if (t.axis, t.kind) == ("tensor", "all-gather"))

    assert each_layer(gathered, "zero3+megatron_sp") == 6 * 2 * (2 * T) * D
