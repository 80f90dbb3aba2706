"""The Llama of `transformers`, trained in torch: on the CPU step by step, on a GPU compiled.

Runs alone, in an interpreter that has torch and transformers; prints one line of JSON.
"""

import argparse
import json
import time

import common


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where", choices=("cpu", "gpu"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", help="a case of gpu_train.py")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    result = cpu(arguments) if arguments.where == "cpu" else gpu(arguments)
    print(json.dumps({**result, "versions": common.versions()}))


def cpu(arguments: argparse.Namespace) -> dict:
    """Eager float32 on two threads: the fused AdamW, scaled-dot-product attention."""
    import cpu_step
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = make_model({**cpu_step.MODEL, "max_seq": cpu_step.SEQ})
    tokens, targets = (torch.from_numpy(x.astype("int64")) for x in cpu_step.make_tokens())
    optimizer = make_optimizer(model, cpu_step.OPTIMIZER)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cpu_step.CLIP_NORM)
        optimizer.step()
        return loss.detach()

    first_loss = float(step())
    outside = time.process_time()

    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    rows = common.repeat(run, steps=arguments.steps, repeats=arguments.repeats)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "rows": rows,
        "outside_cpu_s": outside,
        "first_loss": first_loss,
        "parameters": parameters,
    }


def gpu(arguments: argparse.Namespace) -> dict:
    """float32 parameters, bf16 autocast, torch.compile, fused AdamW; no recomputation."""
    import gpu_train
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.smoke:
        raise SystemExit("torch_llama: no GPU is visible to torch; run with --smoke on a CPU")
    sizes = gpu_train.sizes_of(arguments.case, arguments.smoke)
    rows, seq = 2, sizes["max_seq"]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = make_model(sizes)
        tokens = torch.randint(sizes["vocab"], (rows, seq + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    optimizer = make_optimizer(model, gpu_train.OPTIMIZER)

    def forward() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        flat = logits.flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(flat, targets.flatten())

    # A smoke run has no compiler at hand for the CPU, and need not be fast.
    compiled = torch.compile(forward) if device == "cuda" else forward

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = compiled()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), gpu_train.CLIP_NORM)
        optimizer.step()
        return float(loss.detach())

    losses, seconds = [], []
    for _ in range(gpu_train.WARM_UP + arguments.steps):
        clock = common.Clock()
        losses.append(step())
        seconds.append(clock.read()["wall_s"])
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    measured = gpu_train.rates(sizes, rows, seconds[gpu_train.WARM_UP :])
    return {**measured, "losses": [losses[0], losses[-1]], "peak_bytes": peak}


def make_model(sizes: dict):
    """A Llama of these sizes with SDPA attention, on the current default device and dtype."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["embed"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        intermediate_size=sizes["mlp"],
        max_position_embeddings=sizes["max_seq"],
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).train()


def make_optimizer(model, options: dict):
    """Torch's fused AdamW with the options of Optax's."""
    import torch

    return torch.optim.AdamW(
        model.parameters(),
        lr=options["learning_rate"],
        betas=(options["b1"], options["b2"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        fused=True,
    )


if __name__ == "__main__":
    main()
