"""Whether pipelined transfers leave losses as they are: `plan.offload.pipelined`."""

from collections.abc import Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

from colossax.config import PIPELINED_OPTION, AttentionConfig, OffloadConfig, Plan, Segment
from colossax.models import LlamaConfig, maker
from colossax.offload import PipelinedTest
from colossax.optim import adamw
from colossax.planner.building import build_step
from colossax.tasks.next_token import next_token_loss
from colossax.typing import Batch

STEPS = 20

TOLERANCE = 1e-6
"""Between losses, relative: another algorithm chosen for a matmul may round otherwise."""

MODEL = LlamaConfig(vocab=256, embed=256, layers=6, heads=4, kv_heads=4, mlp=512, max_seq=256)

PLACED = (
    OffloadConfig(activations=1.0),
    OffloadConfig(parameters=1.0, optimizer=1.0, activations=1.0),
)
"""What is in host memory: stacks that loops fill and read, and that they change."""


def check_pipelined(
    device: jax.Device, *, model: LlamaConfig = MODEL, steps: int = STEPS
) -> PipelinedTest:
    """Train a small stack without and with the option, from the same state on the same batches.

    In float32 with the highest matmul precision and attention by XLA, whose results do not change
    from run to run.

    Cost: four compilations, some ten seconds each on a GPU.
    """
    plain, pipelined = [], []
    for placed in PLACED:
        plain += losses(device, placed, {}, model=model, steps=steps)
        pipelined += losses(device, placed, {PIPELINED_OPTION: True}, model=model, steps=steps)
    return compared(plain, pipelined)


def compared(plain: Sequence[float], pipelined: Sequence[float]) -> PipelinedTest:
    """The verdict on losses without and with the option; those not finite differ."""
    without, having = np.asarray(plain, np.float64), np.asarray(pipelined, np.float64)
    finite = bool(np.isfinite(without).all() and np.isfinite(having).all())
    worst = float(np.max(np.abs(having - without) / np.abs(without))) if finite else None
    return PipelinedTest(
        jaxlib=jaxlib.__version__,
        losses=len(plain),
        largest_difference=worst,
        passed=worst is not None and worst <= TOLERANCE,
    )


def losses(
    device: jax.Device,
    placed: OffloadConfig,
    options: dict[str, Any],
    *,
    model: LlamaConfig = MODEL,
    steps: int = STEPS,
) -> list[float]:
    """Of each step, with these options for the compiler."""
    plan = Plan(
        segments=(Segment(remat="full"),),
        attention=AttentionConfig(kernel="xla"),
        offload=placed,
        compiler_options=options,
    )
    values = []
    with jax.default_matmul_precision("highest"):
        step = build_step(maker(model), adamw(1e-3), next_token_loss(), plan, devices=[device])
        state = step.init(0)
        for number in range(steps):
            state, metrics = step(state, _batch(model, number))
            values.append(float(metrics["loss"]))
    return values


def _batch(model: LlamaConfig, number: int) -> Batch:
    """Four rows of random tokens; half of the vocabulary, so that there is something to learn."""
    shape = (4, model.max_seq)
    tokens = np.random.default_rng(number).integers(0, model.vocab // 2, (4, model.max_seq + 1))
    return {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "segments": np.zeros(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "weights": np.ones(shape, np.float32),
    }
