"""MT-NLG's 530 B parameters on 70 nodes of eight H100 as in its paper, and on 64 nodes.

    python bench/mt_nlg.py [--out FILE] [--only TEXT] [--again]

Smith et al. 2022: 105 layers, 20,480 wide, 128 heads, a vocabulary of 51,200, rows of 2048, 1920
of them in a batch; each replica tensor 8 x stage 35, here two of them. 105 layers have no equal
stages on 512 GPUs: 64 nodes run without, 63 of them with 21, 60 with 15. Every row is compiled for
its target, none is computed by formula; seconds are predicted as in `stage_plans.py`.
"""

import dataclasses
from typing import Any

import stage_plans
from stage_plans import Case

BATCH = 1920


class Nlg(Case):
    """A plan of MT-NLG."""

    def base(self) -> Any:
        from colossax.models import GPT2Config
        from colossax.recipes import recipe

        found = recipe("gpt2_124m")
        model = GPT2Config(
            vocab=51_200, embed=20_480, layers=105, heads=128, mlp=81_920, max_seq=2048
        )
        data = dataclasses.replace(found.data, seq_len=2048)
        return found.replace(model=model, data=data)


def cases() -> list[Case]:
    """The paper's mesh, with what this library adds to it, and fewer nodes."""
    paper = {"stage": 35, "data": 2, "tensor": 8}
    found = [("h100:70x8", {"mesh": paper, "batch": batch}) for batch in (16, BATCH)]
    found += [
        ("h100:70x8", {"mesh": paper, "batch": BATCH, "preset": "zero2+megatron_sp"}),
        ("h100:70x8", {"mesh": paper, "batch": BATCH, "preset": "zero1+megatron_sp"}),
        ("h100:70x8", {"mesh": {"stage": 35, "fsdp": 2, "tensor": 8}, "batch": BATCH}),
        ("h100:70x8", {"mesh": {"fsdp": 70, "tensor": 8}, "batch": 1960, "rows": 14}),
        ("h100:64x8", {"mesh": {"fsdp": 64, "tensor": 8}, "batch": BATCH}),
        ("h100:64x8", {"mesh": {"fsdp": 64, "tensor": 8}, "batch": BATCH, "rows": 15}),
        ("h100:63x8", {"mesh": {"stage": 21, "data": 3, "tensor": 8}, "batch": BATCH}),
        ("h100:60x8", {"mesh": {"stage": 15, "fsdp": 4, "tensor": 8}, "batch": BATCH}),
    ]
    return [Nlg(model="mt_nlg", target=target, **how) for target, how in found]


if __name__ == "__main__":
    stage_plans.run(stage_plans.arguments(__doc__, "mt_nlg"), "mt_nlg", cases())
