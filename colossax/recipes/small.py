"""Recipes that train in minutes on a laptop's CPU, on text every machine has."""

from colossax.models import LlamaConfig
from colossax.train.config import DataConfig, OptimizerConfig, SampleConfig, TrainConfig


def llama_stdlib() -> TrainConfig:
    """10 M parameters on the source of Python's standard library; minutes on two CPU cores."""
    return TrainConfig(
        recipe="llama_stdlib",
        model=LlamaConfig(
            vocab=4096, embed=320, layers=6, heads=5, kv_heads=5, mlp=864, max_seq=512
        ),
        data=DataConfig(seq_len=256, global_batch=8, tokenizer_vocab=4096),
        optimizer=OptimizerConfig(peak_lr=2e-3, warmup=20, final_lr_share=0.05),
        steps=180,
        checkpoint_every=60,
        validate_every=60,
        sample=SampleConfig(prompt="def "),
    )


def llama_tiny() -> TrainConfig:
    """Under a million parameters, a fraction of a second per step: for trying things out."""
    return TrainConfig(
        recipe="llama_tiny",
        model=LlamaConfig(
            vocab=512, embed=128, layers=4, heads=8, kv_heads=4, mlp=384, max_seq=256
        ),
        data=DataConfig(seq_len=96, global_batch=24, tokenizer_vocab=512, validation_batches=4),
        optimizer=OptimizerConfig(peak_lr=3e-3, warmup=10),
        steps=100,
        sample=SampleConfig(prompt="def ", max_tokens=60),
    )
