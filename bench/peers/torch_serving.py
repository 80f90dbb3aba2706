"""Requests served by `transformers` on a CPU; a worker of bench/serve_peers.py.

python torch_serving.py make|padded|continuous FOLDER
"""

import json
import os
import statistics
import sys
import time

import torch
import transformers
from serve_peers import MODEL, requests

BATCHES = (8, 16, 32, 64)


def make(folder):
    """A checkpoint of random weights, large enough that tokens differ."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**MODEL, initializer_range=0.08, eos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def loaded(folder, **how):
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    return model.eval()


def padded(model, asked, size):
    """Tokens of each request, and when they were known: those of a batch together at its end."""
    order = sorted(range(len(asked)), key=lambda i: asked[i][1])
    tokens, first, last = {}, {}, {}
    began = time.perf_counter()
    for at in range(0, len(order), size):
        batch = order[at : at + size]
        longest = max(len(asked[i][0]) for i in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(batch):
            prompt = asked[i][0]
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        more = max(asked[i][1] for i in batch)
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=more, do_sample=False, pad_token_id=0
        )
        now = time.perf_counter() - began
        for row, i in enumerate(batch):
            tokens[i] = out[row, longest : longest + asked[i][1]].tolist()
            first[i] = last[i] = now
    return tokens, first, last, time.perf_counter() - began


def continuous(model, asked):
    """Likewise by continuous batching; a request's tokens are known when it is over."""
    config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    tokens, first, last = {}, {}, {}
    began = time.perf_counter()
    for i, (prompt, more) in enumerate(asked):
        manager.add_request(prompt, request_id=str(i), max_new_tokens=more)
    while len(tokens) < len(asked):
        one = manager.get_result(timeout=60)
        if one is None:
            raise RuntimeError("continuous batching gave nothing for a minute")
        if one.is_finished():
            i = int(one.request_id)
            tokens[i] = list(one.generated_tokens)
            first[i] = last[i] = time.perf_counter() - began
    wall = time.perf_counter() - began
    manager.stop(block=True)
    return tokens, first, last, wall


def measured(run, model, asked, *more):
    cpu = os.times()
    with torch.inference_mode():
        tokens, first, last, wall = run(model, asked, *more)
    after = os.times()
    return {
        "tokens_per_s": sum(added for _, added in asked) / wall,
        "cpu_s": after.user + after.system - cpu.user - cpu.system,
        "first_token_s": statistics.median(first.values()),
        "last_token_s": statistics.median(last.values()),
        "tokens": [tokens[i] for i in range(len(asked))],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def main():
    how, folder = sys.argv[1:]
    if how == "make":
        make(folder)
        print("{}")
        return
    asked = requests()
    if how == "continuous":
        model = loaded(folder, attn_implementation="paged|sdpa")
        continuous(model, asked[:4])
        print(json.dumps(measured(continuous, model, asked)))
        return
    model = loaded(folder, attn_implementation="sdpa")
    padded(model, asked[:4], 4)
    best = None
    for size in BATCHES:
        found = {**measured(padded, model, asked, size), "how": f"batches of {size}"}
        if best is None or found["tokens_per_s"] > best["tokens_per_s"]:
            best = found
    print(json.dumps(best))


if __name__ == "__main__":
    main()
