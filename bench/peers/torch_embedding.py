"""Vectors of texts by `transformers` on a CPU; a worker of bench/embed_peers.py.

python torch_embedding.py make|padded|sorted FOLDER
"""

import json
import os
import sys
import time

import torch
import transformers
from embed_peers import MODEL, texts

BATCHES = (1, 8, 16, 32, 64)


def make(folder):
    """A model of random weights, large enough that texts differ."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**MODEL, initializer_range=0.08)
    transformers.BertForMaskedLM(config).save_pretrained(folder)


@torch.no_grad()
def embedded(model, asked, size):
    """The mean of each text's hidden states, of length 1."""
    found = []
    for at in range(0, len(asked), size):
        batch = asked[at : at + size]
        longest = max(map(len, batch))
        ids, mask = (torch.zeros(len(batch), longest, dtype=torch.long) for _ in range(2))
        for row, text in enumerate(batch):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        real = mask[..., None]
        found.append((hidden * real).sum(1) / real.sum(1))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1)


def run(name, folder):
    """The best size of batch."""
    model = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    asked = texts()
    order = list(range(len(asked)))
    if name == "sorted":
        order.sort(key=lambda i: -len(asked[i]))
    given = [asked[i] for i in order]
    embedded(model, given[:64], 32)
    best = None
    for size in BATCHES:
        clock, cpu = time.perf_counter(), os.times()
        vectors = embedded(model, given, size)
        wall, after = time.perf_counter() - clock, os.times()
        if best is None or wall < best[0]:
            spent = after.user + after.system - cpu.user - cpu.system
            best = wall, spent, size, vectors
    wall, spent, size, vectors = best
    back = torch.empty_like(vectors)
    back[torch.tensor(order)] = vectors
    return {
        "texts_per_s": len(asked) / wall,
        "cpu_s": spent,
        "how": f"batches of {size}",
        "vectors": back.tolist(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def main():
    """The command line."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, folder = sys.argv[1:]
    if name == "make":
        make(folder)
        print(json.dumps({}))
    else:
        print(json.dumps(run(name, folder)))


if __name__ == "__main__":
    main()
