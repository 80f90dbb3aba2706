"""The models of `gpu_offload.py`: their sizes, and their bytes and seconds counted beforehand."""

import dataclasses
import math
from typing import Any

import gpu_train

GIB = 2**30
VOCAB, SEQ, HEAD_DIM, KV_HEADS = 32_000, 4096, 128, 8
VOCAB_CHUNKS = 8
LEARNABLE = 64
"""Different tokens that the batch holds."""
RATES = {"adamw": 3e-4, "sgd": 0.2}
STATE_BYTES = {"float32": 8, "mixed": 6, "bfloat16": 4}
PEER_LAYERS = (4, 12)
PEER_STEPS = 3
ASSUMED = {
    "copy_bytes_per_s": 50e9,
    "flops_per_s": 400e12,
    "pin_bytes_per_s": 2.5e9,
    "start_s": 10.0,
    "compile_s": 10.0,
}
"""What planned times are made of: a direction of PCIe, executed FLOP/s, pinning of host memory, a
process up to JAX's devices, one compilation."""
FIXED_S = {"copies": 40.0, "rates": 30.0, "pipelined": 120.0}
TINY = {"vocab": 256, "embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 96}
TINY_SEQ, TINY_LAYERS, TINY_PEERS = 32, 4, (1, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model that trains with layers in host memory.

    Attributes:
        embed: Width; heads are of `HEAD_DIM`.
        layers: How many.
        mlp: Width of the hidden layer.
        rows: Of `SEQ` tokens.
        share: Of the layers, how many have parameters, optimizer state and inputs on the host.
        runs: Clipping and steps, one after another.
        optimizer: `adamw` or `sgd`.
        state: Of AdamW's moments.
        params: Dtype of parameters.
        aot_gib: Device and host GiB per run, compiled for an H200 by JAX 0.10.2 (`--aot`).
    """

    embed: int
    layers: int
    mlp: int
    rows: int = 8
    share: float
    runs: tuple[tuple[str, int], ...]
    optimizer: str = "adamw"
    state: str = "float32"
    params: str = "float32"
    aot_gib: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Fields of a `LlamaConfig`."""
        return {
            "vocab": VOCAB,
            "embed": self.embed,
            "layers": self.layers,
            "heads": self.embed // HEAD_DIM,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "mlp": self.mlp,
            "max_seq": SEQ,
        }


CASES = {
    "adamw4b": Case(
        embed=3072,
        layers=38,
        mlp=8192,
        share=1.0,
        runs=(("none", 5), ("two_pass", 2)),
        aot_gib={"none": (7.00, 49.88), "two_pass": (7.36, 49.88)},
    ),
    "adamw14b": Case(
        embed=5120,
        layers=50,
        mlp=13_824,
        share=0.5,
        runs=(("none", 4), ("two_pass", 1)),
        aot_gib={"none": (96.03, 84.72), "two_pass": (98.01, 84.72)},
    ),
    "adamw16b": Case(
        embed=5120,
        layers=57,
        mlp=13_824,
        share=0.5,
        state="mixed",
        runs=(("none", 4),),
        aot_gib={"none": (91.23, 83.40)},
    ),
    "lomo65b": Case(
        embed=8192,
        layers=76,
        mlp=28_672,
        rows=1,
        share=0.5,
        runs=(("two_pass", 4),),
        aot_gib={"two_pass": (69.19, 62.94)},
        optimizer="sgd",
        params="bfloat16",
    ),
}
PEERS = {"adamw4b": CASES["adamw4b"], "adamw14b": CASES["adamw14b"]}
PEER_OF = {"adamw4b": "adamw4b", "adamw14b": "adamw14b", "adamw16b": "adamw14b"}


def weights_of(sizes: dict[str, int]) -> int:
    """Numbers in the matrices of a layer."""
    heads = sizes["heads"] + sizes["kv_heads"]
    return sizes["embed"] * (2 * sizes["head_dim"] * heads + 3 * sizes["mlp"])


def bytes_per_parameter(case: Case) -> int:
    """Of a parameter and its optimizer state."""
    own = 4 if case.params == "float32" else 2
    return own + (STATE_BYTES[case.state] if case.optimizer == "adamw" else 0)


def host_layers(case: Case, layers: int) -> int:
    """Of so many layers, those in host memory."""
    return math.ceil(case.share * layers - 1e-6)


def state_host_bytes(case: Case, sizes: dict[str, int]) -> int:
    """Of the training state: matrices of the host's layers, and what AdamW keeps of them."""
    return host_layers(case, sizes["layers"]) * weights_of(sizes) * bytes_per_parameter(case)


def host_bytes(case: Case) -> int:
    """Pinned memory in all: the state, and each layer's input."""
    inputs = 2 * case.rows * SEQ * case.embed
    return state_host_bytes(case, case.sizes) + host_layers(case, case.layers) * inputs


def pool_gib(part: str) -> int:
    """Limit of the pool of pinned memory: what the part needs, and 1 % and 2 GiB for odd ends."""
    return math.ceil(1.01 * host_bytes(CASES[part]) / GIB + 2) if part in CASES else 24


def planned_s(part: str) -> float:
    """Seconds that a part takes where `ASSUMED` holds."""
    a = ASSUMED
    if part in FIXED_S:
        return FIXED_S[part]
    if part == "peers":
        steps = [
            PEER_STEPS * _step_s(dataclasses.replace(case, layers=layers, share=0.0), "none")
            for case in PEERS.values()
            for layers in PEER_LAYERS
        ]
        return a["start_s"] + len(steps) * a["compile_s"] + sum(steps)
    case = CASES[part]
    pinned = pool_gib(part) * GIB / a["pin_bytes_per_s"]
    filled = host_bytes(case) / a["copy_bytes_per_s"]
    # Initialising compiles as well.
    compiled = (len(case.runs) + 1) * a["compile_s"]
    steps = sum(count * _step_s(case, clipping) for clipping, count in case.runs)
    return a["start_s"] + pinned + filled + compiled + steps


def _step_s(case: Case, clipping: str) -> float:
    """The longer of computing, forward passes run again included, and of copying to the device."""
    passes = 2 if clipping == "two_pass" else 1
    flops = (3 * passes + 1) / 3 * gpu_train.flops_per_token(case.sizes) * case.rows * SEQ
    own = 4 if case.params == "float32" else 2
    fetched = own * passes + bytes_per_parameter(case)
    copied = host_layers(case, case.layers) * weights_of(case.sizes) * fetched
    return max(flops / ASSUMED["flops_per_s"], copied / ASSUMED["copy_bytes_per_s"])


def sizes_of(case: Case, tiny: bool) -> dict[str, int]:
    """Sizes of a case, or toy ones of the same form."""
    if not tiny:
        return case.sizes
    layers = min(case.layers, TINY_LAYERS)
    return {**TINY, "layers": layers, "max_seq": TINY_SEQ}


def build(case: Case, clipping: str, devices: Any, tiny: bool) -> Any:
    """The step of a case; clipping `none` and `in memory` leave gradients as they are."""
    import colossax
    from colossax.config import LossConfig, OffloadConfig, Precision, Segment
    from colossax.models import LlamaConfig, maker
    from colossax.planner import build_step
    from colossax.tasks import next_token_loss

    clipped = clipping not in ("none", "in memory")
    offload = OffloadConfig(
        parameters=case.share,
        optimizer=case.share,
        activations=case.share,
        clipping=clipping if clipped else "stack",
    )
    plan = colossax.Plan(
        segments=(Segment(remat="full"),),
        precision=Precision(params=case.params, compute="bfloat16"),
        loss=LossConfig(vocab_chunks=1 if tiny else VOCAB_CHUNKS),
        offload=offload,
    )
    return build_step(
        maker(LlamaConfig(**sizes_of(case, tiny))),
        _optimizer(case),
        next_token_loss(),
        plan,
        devices=devices,
        clip_norm=1.0 if clipped else None,
    )


def _optimizer(case: Case) -> Any:
    from colossax.optim import adamw, sgd

    rate = RATES[case.optimizer]
    if case.optimizer == "sgd":
        return sgd(rate)
    low = {"float32": (), "mixed": ("moment_dtype",)}.get(
        case.state, ("moment_dtype", "second_moment_dtype")
    )
    return adamw(rate, weight_decay=0.0, **dict.fromkeys(low, "bfloat16"))


def batch_of(case: Case, tiny: bool) -> dict[str, Any]:
    """Rows of tokens that count up from different numbers, again and again."""
    import numpy as np

    rows, seq = (2, TINY_SEQ) if tiny else (case.rows, SEQ)
    text = (7 * np.arange(rows)[:, None] + np.arange(seq + 1)[None]) % LEARNABLE
    tokens = text.astype(np.int32)
    weights = np.ones((rows, seq), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
