"""What a small step sends, to the byte: casts before gathers, microbatches that move no tokens."""

import pytest

from colossax.aot import assert_collectives, parse_target, target_devices
from colossax.config import AttentionConfig, BatchConfig, Plan, Precision
from colossax.models import LlamaConfig
from colossax.planner import inspect_run
from colossax.recipes import recipe
from colossax.tasks import DataConfig

pytestmark = pytest.mark.aot

LAYERS, D, F, V, SEQ, PIECES, DEVICES = 2, 256, 512, 256, 256, 4, 8
MATRICES = 4 * D * D + 3 * D * F
"""Parameters in the matrices of one layer."""

CONFIG = recipe("llama_tiny").replace(
    model=LlamaConfig(vocab=V, embed=D, layers=LAYERS, heads=4, kv_heads=4, mlp=F, max_seq=SEQ),
    plan=Plan(
        mesh={"fsdp": DEVICES},
        attention=AttentionConfig(kernel="xla"),
        precision=Precision(compute="bfloat16"),
        batch=BatchConfig(accumulation=PIECES),
    ),
    data=DataConfig(seq_len=SEQ, global_batch=PIECES * DEVICES, tokenizer_vocab=V),
)


@pytest.mark.catches("cast-after-gather")
@pytest.mark.catches("microbatches-in-a-row")
def test_weights_are_gathered_in_the_compute_dtype_and_no_token_moves():
    """Matrices, table and head in bfloat16, norms in float32; what backward gathers are matrices.

    A vocabulary as small as a device's tokens is gathered as well. Nothing is exchanged but that:
    not a token of the batch, whose rows are cut into microbatches where they lie.
    """
    one = inspect_run(CONFIG, parse_target(f"h100:1x{DEVICES}"))
    both_ways = LAYERS * (2 * MATRICES + 4 * 2 * D) + 2 * 2 * V * D + 4 * D
    expected = {
        ("all-gather", "fsdp"): PIECES * (both_ways + LAYERS * 2 * MATRICES),
        ("reduce-scatter", "fsdp"): PIECES * both_ways,
    }
    mesh = CONFIG.plan.bind(target_devices(one.target)).mesh
    # Of fewer bytes are the sums of losses and norms.
    assert_collectives(one.program.hlo, expected, mesh=mesh, within=0.0, ignore_below=1024)
