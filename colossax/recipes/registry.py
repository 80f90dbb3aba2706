"""Recipes by name."""

from collections.abc import Callable

from colossax.config import nearest
from colossax.errors import InputError
from colossax.recipes.large import (
    deepseek_v3,
    gpt2_124m,
    llama3_8b,
    llama3_8b_1m,
    llama3_70b,
    mistral_7b,
    mixtral_8x7b,
    qwen3_0p6b,
    qwen3_30b_a3b,
)
from colossax.recipes.post_training import (
    distill,
    dpo,
    grpo,
    ipo,
    kto,
    orpo,
    ppo,
    reward,
    sft,
    simpo,
)
from colossax.recipes.small import (
    bert_stdlib,
    clip_digits,
    finetune,
    glide_tiny,
    llama_stdlib,
    llama_tiny,
    llava_digits,
    moe_tiny,
    t5_stdlib,
    vit_digits,
    whisper_tones,
)
from colossax.tasks import TrainConfig

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    make.__name__: make
    for make in (
        llama_stdlib,
        llama_tiny,
        glide_tiny,
        moe_tiny,
        bert_stdlib,
        t5_stdlib,
        vit_digits,
        clip_digits,
        llava_digits,
        whisper_tones,
        finetune,
        sft,
        distill,
        reward,
        dpo,
        ipo,
        simpo,
        orpo,
        kto,
        grpo,
        ppo,
        gpt2_124m,
        qwen3_0p6b,
        mistral_7b,
        llama3_8b,
        llama3_8b_1m,
        llama3_70b,
        mixtral_8x7b,
        qwen3_30b_a3b,
        deepseek_v3,
    )
}

DEFAULT_RECIPE = "llama_stdlib"


def recipe(name: str) -> TrainConfig:
    """The configuration of this name.

    Raises:
        InputError: No such recipe; the nearest is named.
    """
    if name not in RECIPES:
        raise InputError(f"no recipe is called '{name}'{nearest(name, RECIPES)}")
    return RECIPES[name]()
