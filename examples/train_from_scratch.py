"""Train a small Llama on text from nothing, then let it speak.

Usage: python examples/train_from_scratch.py [FILE_OR_FOLDER]
"""

import sys

import optax

import colossax
from colossax.data import (
    BatchLoader,
    Rows,
    encode_corpus,
    path_documents,
    stdlib_documents,
    train_tokenizer,
)
from colossax.inference import Generator
from colossax.models import LlamaConfig, maker

BATCH, SEQ, VOCAB = 24, 96, 512


def main(path: str | None = None, steps: int = 200) -> list[float]:
    # Text in, batches out: rows of packed documents, shuffled by seed, row r always the same.
    documents = path_documents(path) if path else stdlib_documents()
    tokenizer = train_tokenizer(documents, VOCAB)
    training, held_out = encode_corpus(documents, tokenizer).split(0.02)
    batches = BatchLoader(Rows(training, seq_len=SEQ, seed=0), BATCH)

    # A model, an optimizer, a loss, and a plan that spreads them over every device there is.
    config = LlamaConfig(
        vocab=VOCAB, embed=128, layers=4, heads=8, kv_heads=4, mlp=384, max_seq=SEQ
    )
    plan = colossax.preset("zero3")
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, steps))
    state, step = colossax.boost(
        maker(config), optimizer, colossax.next_token_loss(), plan, clip_norm=1.0
    )

    losses = []
    for _ in range(steps):
        state, metrics = step(state, next(batches))
        losses.append(float(metrics["loss"]))
        if len(losses) % 20 == 0:
            print(f"step {len(losses):4d}  loss {losses[-1]:.3f}")

    prompt = tokenizer.encode("def ")
    found = Generator(step.spec, step.bound, state["params"]).generate(prompt, max_tokens=40)
    print(tokenizer.decode([*prompt, *found.tokens]))
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
