"""The largest model that trains within a memory budget, layers in host memory, one GPU.

    python bench/offload_budget.py [--out FILE] [--only GIGABYTES]

Llama-shaped models (heads of 128, MLP 8/3 of the width, vocabulary 32,000 with a head of its own),
2,048 tokens a step, bf16 compute, full recomputation, AdamW, gradients clipped to norm 1; compiled
for an H200 that is not there (needs the extra `aot`). The host may use four times the device's
budget; 1 GB is 1e9 bytes. For each budget the deepest model is found for which
`plan.offload auto` finds a placement; one layer more must be refused.

    bound = (device - W + host) / 14

is the most parameters that layers can have: 12 bytes each for parameter and moments and 2 for its
gradient until the norm is known, in one of the two memories. W is the device bytes of the
compiled step with every layer in host memory, embedding and head with all they have among them.
`share` is the parameters in layers over the bound, `W / formula` over `offload.working_set_bytes`.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

GB = 10**9
TARGET = "h200:1x1"
TOKENS, VOCAB, CHUNKS = 2048, 32_000, 8
BYTES = 14
WIDTHS = {4: 2048, 8: 2560, 16: 4096, 24: 4096}
"""Width of the models by budget in GB."""


def mlp_of(embed: int) -> int:
    return round(8 * embed / 3 / 256) * 256


def config_of(embed: int, layers: int, offload: Any) -> Any:
    """The run with these layers."""
    from colossax.config import LossConfig, Plan, Precision, Segment
    from colossax.models import LlamaConfig
    from colossax.tasks import DataConfig, TrainConfig

    heads = embed // 128
    return TrainConfig(
        recipe="offload_budget",
        model=LlamaConfig(
            vocab=VOCAB,
            embed=embed,
            layers=layers,
            heads=heads,
            kv_heads=heads,
            mlp=mlp_of(embed),
            max_seq=TOKENS,
        ),
        plan=Plan(
            segments=(Segment(remat="full"),),
            precision=Precision(compute="bfloat16"),
            loss=LossConfig(vocab_chunks=CHUNKS),
            offload=offload,
        ),
        data=DataConfig(seq_len=TOKENS, global_batch=1),
        steps=10,
        clip_norm=1.0,
    )


def layer_params(embed: int) -> int:
    return 4 * embed * embed + 3 * embed * mlp_of(embed)


def working_set(embed: int, layers: int = 8) -> dict[str, int]:
    """W as compiled and by formula; it does not depend on the layers but for their vectors."""
    from colossax.aot import parse_target
    from colossax.config import OffloadConfig
    from colossax.offload import working_set_bytes
    from colossax.planner.counting.compiled import compiled_step

    everything = OffloadConfig(parameters=1, optimizer=1, activations=1)
    _, program, _ = compiled_step(config_of(embed, layers, everything), parse_target(TARGET))
    terms = working_set_bytes(
        vocab=VOCAB,
        embed=embed,
        layers=layers,
        layer_params=layer_params(embed),
        largest_matrix=embed * mlp_of(embed),
        tokens=TOKENS,
        vocab_chunks=CHUNKS,
    )
    return {"compiled": program.device_bytes, "formula": sum(terms.values())}


def fitted(embed: int, layers: int, device_gb: int) -> Any:
    """What `auto` finds, or the refusal."""
    from colossax.aot import parse_target
    from colossax.config import OffloadConfig
    from colossax.errors import PlanError
    from colossax.planner import settle_for_target

    offload = OffloadConfig(auto=True, device_gb=device_gb, host_gb=4 * device_gb)
    try:
        return settle_for_target(config_of(embed, layers, offload), parse_target(TARGET))[1].fitted
    except PlanError as refusal:
        return str(refusal)


def largest(device_gb: int, embed: int, working: dict[str, int]) -> dict[str, Any]:
    """The deepest model within a budget."""
    per_layer = layer_params(embed)
    bound = (5 * device_gb * GB - working["compiled"]) / BYTES
    layers = int(bound // per_layer) + 1
    found = refusal = fitted(embed, layers, device_gb)
    while isinstance(found, str):
        layers, refusal = layers - 1, found
        found = fitted(embed, layers, device_gb)
    assert isinstance(refusal, str), "one layer more than the bound allows was placed"
    assert found.device_bytes <= device_gb * GB and found.host_bytes <= 4 * device_gb * GB
    return {
        "device_gb": device_gb,
        "host_gb": 4 * device_gb,
        "embed": embed,
        "layers": layers,
        "parameters": layers * (per_layer + 2 * embed) + (2 * VOCAB + 1) * embed,
        "layer_parameters": layers * per_layer,
        "bound": round(bound),
        "share": layers * per_layer / bound,
        "device_bytes": found.device_bytes,
        "host_bytes": found.host_bytes,
        "W": working["compiled"],
        "W formula": working["formula"],
        "W / formula": working["compiled"] / working["formula"],
        "resident": dict(found.resident),
        "compiles": found.compiles,
        "one layer more": refusal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "offload_budget.json")
    parser.add_argument("--only", type=int, choices=WIDTHS, help="one of the budgets")
    arguments = parser.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    rows: list[dict[str, Any]] = []
    sets: dict[int, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COLOSSAX_CACHE"] = folder  # every placement is found here and now
        for device_gb, embed in WIDTHS.items():
            if arguments.only not in (None, device_gb):
                continue
            sets[embed] = sets.get(embed) or working_set(embed)
            rows.append(largest(device_gb, embed, sets[embed]))
            print(rows[-1], file=sys.stderr, flush=True)
            result = {
                "benchmark": "offload_budget",
                "target": TARGET,
                "hardware": common.hardware(),
                "versions": common.versions(),
                "rows": rows,
            }
            common.write_json(arguments.out, result)
    names = [name for name in rows[0] if name not in ("resident", "one layer more")]
    print(common.table(names, [[row[name] for name in names] for row in rows]))


if __name__ == "__main__":
    main()
