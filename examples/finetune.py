"""Fine-tune a Hugging Face model: import it once, then train the checkpoint on your text.

Usage: python examples/finetune.py HF_FOLDER CHECKPOINT TEXT
"""

import sys
from pathlib import Path

import optax

import colossax
from colossax.data import BatchLoader, Rows, encode_corpus, path_documents
from colossax.inference import open_checkpoint
from colossax.models import maker
from colossax.models.hf import import_checkpoint

BATCH, SEQ = 8, 64


def main(hf_folder: str, checkpoint: str, text: str, steps: int = 50) -> list[float]:
    # Layer by layer from safetensors into our own layout; nothing is ever held whole.
    if not Path(checkpoint).exists():
        import_checkpoint(hf_folder, checkpoint)
    stored = open_checkpoint(checkpoint)

    # Each device reads the shards the plan gives it, as float32 masters whatever the file holds.
    plan = colossax.preset("zero3")
    params = stored.load(plan).params
    step = colossax.build_step(
        maker(stored.model), optax.adamw(3e-4), colossax.next_token_loss(), plan, clip_norm=1.0
    )
    state = step.init_from(params)

    corpus = encode_corpus(path_documents(text), stored.tokenizer)
    rows = Rows(corpus.whole(), seq_len=SEQ, seed=0)
    batches = BatchLoader(rows, BATCH)

    losses = []
    for _ in range(steps):
        state, metrics = step(state, next(batches))
        losses.append(float(metrics["loss"]))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} over {steps} steps")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
