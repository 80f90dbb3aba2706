"""Fine-tune a Hugging Face model within a device's memory: the layers that do not fit stay outside.

Usage: python examples/finetune_offload.py HF_FOLDER CHECKPOINT TEXT DEVICE_GB
"""

import sys
from pathlib import Path

import colossax
from colossax.config import OffloadConfig, Plan, Segment
from colossax.data import BatchLoader, Rows, encode_corpus, path_documents
from colossax.inference import open_checkpoint
from colossax.models import maker
from colossax.models.hf import import_checkpoint
from colossax.optim import adamw

BATCH, SEQ = 8, 64


def main(
    hf_folder: str, checkpoint: str, text: str, device_gb: float, steps: int = 50
) -> list[float]:
    if not Path(checkpoint).exists():
        import_checkpoint(hf_folder, checkpoint)
    stored = open_checkpoint(checkpoint)
    corpus = encode_corpus(path_documents(text), stored.tokenizer)
    batches = BatchLoader(Rows(corpus.whole(), seq_len=SEQ, seed=0), BATCH)
    batch = next(batches)

    def make_step(plan: Plan):
        # Layers are updated one by one, so the optimizer must treat them one by one, as ours do.
        return colossax.build_step(
            maker(stored.model), adamw(3e-4), colossax.next_token_loss(), plan, clip_norm=1.0
        )

    # Compiled at most three times, nothing allocated: how many layers stay on the device.
    wanted = Plan(
        segments=(Segment(remat="full"),),
        offload=OffloadConfig(auto=True, device_gb=device_gb),
    )
    fitted = colossax.fit_offload(make_step, wanted, batch)
    print(fitted.line)

    # Each layer is read straight to where it will live.
    step = make_step(fitted.plan)
    state = step.init_from(stored.load(fitted.plan).params)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        batch = next(batches)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} over {steps} steps")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:4], float(sys.argv[4]))
