"""Published models at their published sizes, for GPUs.

They train on `--data PATH` with the model's own `--data.tokenizer FILE`, which is asked for: a
vocabulary of this size is not learnt from the text at hand. To try one out without it, ask for a
small trained one (`--data.tokenizer_vocab 4096`), which uses the first ids of the vocabulary.

Matmuls run in bfloat16 over float32 parameters, layers are recomputed in backward, and logits
are made in chunks of the vocabulary.
"""

import dataclasses

from colossax.config import BatchConfig, LossConfig, Plan, Precision, Segment, preset
from colossax.models import (
    DeepSeekV3Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoEConfig,
)
from colossax.nn import YarnScaling
from colossax.tasks import DataConfig, OptimizerConfig, SampleConfig, TrainConfig

_SAMPLE = SampleConfig(prompt="The ")


def _gpu_plan(
    name: str, *, vocab_chunks: int, microbatch: int, mesh: dict[str, int] | None = None
) -> Plan:
    return preset(
        name,
        mesh=mesh,
        segments=(Segment(remat="full"),),
        precision=Precision(compute="bfloat16"),
        loss=LossConfig(vocab_chunks=vocab_chunks),
        batch=BatchConfig(microbatch=microbatch),
    )


def gpt2_124m() -> TrainConfig:
    """GPT-2 small: half a million tokens per step, 64 rows of each device at a time."""
    return TrainConfig(
        recipe="gpt2_124m",
        model=GPT2Config(vocab=50_257, embed=768, layers=12, heads=12, mlp=3072, eos=50_256),
        plan=_gpu_plan("zero3", vocab_chunks=8, microbatch=64),
        data=DataConfig(seq_len=1024, global_batch=512),
        optimizer=OptimizerConfig(peak_lr=6e-4, warmup=700),
        steps=19_000,
        checkpoint_every=1000,
        validate_every=250,
        sample=_SAMPLE,
    )


def qwen3_0p6b() -> TrainConfig:
    """Qwen3 0.6B, whose embedding is a quarter of it and also its head."""
    return TrainConfig(
        recipe="qwen3_0p6b",
        model=Qwen3Config(
            vocab=151_936,
            embed=1024,
            layers=28,
            heads=16,
            kv_heads=8,
            mlp=3072,
            eos=151_645,
        ),
        plan=_gpu_plan("zero3", vocab_chunks=16, microbatch=8),
        data=DataConfig(seq_len=4096, global_batch=128),
        optimizer=OptimizerConfig(peak_lr=1e-3, warmup=1000),
        steps=50_000,
        checkpoint_every=1000,
        validate_every=500,
        sample=_SAMPLE,
        target="h100:1x1",
    )


def mistral_7b() -> TrainConfig:
    """Mistral 7B v0.1: grouped queries and a window of 4096 keys."""
    return TrainConfig(
        recipe="mistral_7b",
        model=MistralConfig(
            vocab=32_000,
            embed=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            mlp=14_336,
            eos=2,
        ),
        plan=_gpu_plan("zero3", vocab_chunks=8, microbatch=1),
        data=DataConfig(seq_len=8192, global_batch=64),
        optimizer=OptimizerConfig(peak_lr=3e-4, warmup=2000),
        steps=100_000,
        checkpoint_every=1000,
        validate_every=500,
        sample=_SAMPLE,
        target="h100:1x8",
    )


def llama3_8b() -> TrainConfig:
    """Llama 3 8B at its full context of 8192."""
    return TrainConfig(
        recipe="llama3_8b",
        model=LlamaConfig(
            vocab=128_256,
            embed=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            mlp=14_336,
            max_seq=8192,
            rope_theta=500_000.0,
            eos=128_001,
        ),
        plan=_gpu_plan("zero3", vocab_chunks=8, microbatch=1),
        data=DataConfig(seq_len=8192, global_batch=64),
        optimizer=OptimizerConfig(peak_lr=3e-4, warmup=2000),
        steps=100_000,
        checkpoint_every=1000,
        validate_every=500,
        sample=_SAMPLE,
        target="h100:1x8",
    )


def llama3_8b_1m() -> TrainConfig:
    """Llama 3 8B on rows of 1,048,576 tokens: eight devices exchange heads, eight form a ring."""
    small = llama3_8b()
    return small.replace(
        recipe="llama3_8b_1m",
        model=dataclasses.replace(small.model, max_seq=2**20),
        plan=_gpu_plan("zero3+usp", vocab_chunks=8, microbatch=1, mesh={"ring": -1, "ulysses": 8}),
        data=DataConfig(seq_len=2**20, global_batch=4),
        target="h100:8x8",
    )


def llama3_70b() -> TrainConfig:
    """Llama 3 70B: eight devices share each layer's matmuls, the rest share its storage."""
    small = llama3_8b()
    model = LlamaConfig(
        vocab=128_256,
        embed=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        mlp=28_672,
        max_seq=8192,
        rope_theta=500_000.0,
        eos=128_001,
    )
    return small.replace(
        recipe="llama3_70b",
        model=model,
        plan=_gpu_plan(
            "zero3+megatron_sp", vocab_chunks=8, microbatch=1, mesh={"fsdp": -1, "tensor": 8}
        ),
        optimizer=OptimizerConfig(peak_lr=1.5e-4, warmup=2000),
        target="h100:8x8",
    )


def mixtral_8x7b() -> TrainConfig:
    """Mixtral 8x7B: 47 billion parameters, of which a token meets 13; experts over 8 GPUs of each.

    With AdamW in float32 its state is 560 GB of parameters and moments, and gradients are 187 more:
    16 GPUs, or 8 with layers updated during backward (`--plan.offload.fused true
    --plan.offload.clipping two_pass`).
    """
    return TrainConfig(
        recipe="mixtral_8x7b",
        model=MixtralConfig(
            vocab=32_000,
            embed=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            mlp=14_336,
            experts=8,
            choices=2,
            eos=2,
        ),
        plan=_gpu_plan("zero3", vocab_chunks=8, microbatch=1, mesh={"fsdp": -1, "expert": 8}),
        data=DataConfig(seq_len=4096, global_batch=256),
        optimizer=OptimizerConfig(peak_lr=1e-4, warmup=2000),
        steps=100_000,
        checkpoint_every=1000,
        validate_every=500,
        sample=_SAMPLE,
        target="h100:2x8",
    )


def qwen3_30b_a3b() -> TrainConfig:
    """Qwen3 30B-A3B: 128 experts, of which a token takes 8; experts over 8 GPUs."""
    return TrainConfig(
        recipe="qwen3_30b_a3b",
        model=Qwen3MoEConfig(
            vocab=151_936,
            embed=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            mlp=6144,
            expert_mlp=768,
            experts=128,
            choices=8,
            eos=151_645,
        ),
        plan=_gpu_plan("zero3", vocab_chunks=16, microbatch=1, mesh={"fsdp": -1, "expert": 8}),
        data=DataConfig(seq_len=4096, global_batch=256),
        optimizer=OptimizerConfig(peak_lr=3e-4, warmup=2000),
        steps=100_000,
        checkpoint_every=1000,
        validate_every=500,
        sample=_SAMPLE,
        target="h100:1x8",
    )


def deepseek_v3() -> TrainConfig:
    """DeepSeek V3: 671 billion parameters, of which a token meets 37; 4 experts on each GPU of 64.

    With AdamW in float32 its state is 8 TB, 31 GB on each of 256 GPUs.
    """
    scaling = YarnScaling(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    return TrainConfig(
        recipe="deepseek_v3",
        model=DeepSeekV3Config(
            vocab=129_280,
            embed=7168,
            layers=61,
            heads=128,
            mlp=18_432,
            expert_mlp=2048,
            experts=256,
            choices=8,
            shared=1,
            first_dense=3,
            scale=2.5,
            rope_scaling=scaling,
            eos=1,
        ),
        plan=_gpu_plan("zero3", vocab_chunks=16, microbatch=1, mesh={"fsdp": -1, "expert": 64}),
        data=DataConfig(seq_len=4096, global_batch=1024),
        optimizer=OptimizerConfig(peak_lr=2.2e-4, warmup=2000),
        steps=100_000,
        checkpoint_every=1000,
        validate_every=500,
        sample=_SAMPLE,
        target="h100:32x8",
    )
