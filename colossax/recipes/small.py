"""Recipes that train in minutes on a laptop's CPU, on text every machine has."""

from colossax.config import LossConfig, OffloadConfig, Plan, Precision, Segment
from colossax.models import (
    BERTConfig,
    CLIPConfig,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    T5Config,
    ViTConfig,
    WhisperConfig,
)
from colossax.nn import DrafterConfig, EncoderPart, HeadConfig
from colossax.tasks import (
    DataConfig,
    MaskConfig,
    OptimizerConfig,
    SampleConfig,
    SpanConfig,
    TrainConfig,
)


def llama_stdlib() -> TrainConfig:
    """10 M parameters on the source of Python's standard library; minutes on two CPU cores.

    Few tokens a step and many steps: so small a budget of tokens is spent best that way.
    """
    return TrainConfig(
        recipe="llama_stdlib",
        model=LlamaConfig(
            vocab=4096,
            embed=384,
            layers=4,
            heads=6,
            kv_heads=6,
            mlp=1024,
            max_seq=512,
            init_std=0.05,
        ),
        plan=Plan(loss=LossConfig(vocab_chunks=4)),
        data=DataConfig(
            seq_len=256,
            global_batch=4,
            tokenizer_vocab=4096,
            validation_fraction=0.05,
            validation_batches=16,
        ),
        optimizer=OptimizerConfig(peak_lr=1e-3, warmup=15, b2=0.98, final_lr_share=0.02),
        steps=330,
        checkpoint_every=110,
        validate_every=110,
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


def glide_tiny() -> TrainConfig:
    """A drafter for the model of `llama_stdlib` (`--init` its run); minutes on two CPU cores.

    One layer, which learns to say what that model will say next, up to 4 tokens ahead.
    """
    return llama_stdlib().replace(
        recipe="glide_tiny",
        drafter=DrafterConfig(layers=1, block=4),
        optimizer=OptimizerConfig(peak_lr=2e-3, warmup=15, b2=0.98, final_lr_share=0.02),
        steps=300,
        checkpoint_every=100,
        validate_every=100,
        sample=SampleConfig(),
    )


def moe_tiny() -> TrainConfig:
    """A mixture of 8 experts, of which each token takes 2; minutes on two CPU cores."""
    return TrainConfig(
        recipe="moe_tiny",
        model=MixtralConfig(
            vocab=1024,
            embed=128,
            layers=4,
            heads=8,
            kv_heads=4,
            mlp=192,
            experts=8,
            choices=2,
            balance_loss=0.01,
            max_seq=256,
            rope_theta=10_000.0,
            init_std=0.05,
        ),
        data=DataConfig(
            seq_len=128,
            global_batch=32,
            tokenizer_vocab=1024,
            validation_fraction=0.05,
            validation_batches=8,
        ),
        optimizer=OptimizerConfig(peak_lr=3e-3, warmup=20, final_lr_share=0.05),
        steps=300,
        checkpoint_every=100,
        validate_every=100,
        sample=SampleConfig(prompt="def ", max_tokens=60),
    )


def bert_stdlib() -> TrainConfig:
    """A small BERT that tells masked tokens of the text of `llama_stdlib`; minutes on two cores.

    The tokenizer leaves the vocabulary's last number to what is masked.
    """
    return TrainConfig(
        recipe="bert_stdlib",
        model=BERTConfig(
            vocab=1024,
            embed=192,
            layers=4,
            heads=6,
            mlp=768,
            max_seq=256,
            init_std=0.05,
        ),
        data=DataConfig(
            seq_len=128,
            global_batch=32,
            tokenizer_vocab=1023,
            validation_fraction=0.05,
            validation_batches=8,
            masking=MaskConfig(),
        ),
        optimizer=OptimizerConfig(peak_lr=1e-3, warmup=40, b2=0.98, final_lr_share=0.05),
        steps=600,
        checkpoint_every=200,
        validate_every=200,
    )


def t5_stdlib() -> TrainConfig:
    """A small T5 1.1 that writes spans left out of the text of `llama_stdlib`, in minutes.

    The tokenizer leaves the vocabulary's last numbers to what stands for spans.
    """
    return TrainConfig(
        recipe="t5_stdlib",
        model=T5Config(
            vocab=1024,
            embed=192,
            layers=3,
            decoder_layers=3,
            heads=6,
            head_dim=32,
            mlp=512,
            gated=True,
            activation="gelu_tanh",
            tied=False,
            max_seq=256,
            init_std=0.05,
            eos=None,
        ),
        data=DataConfig(
            seq_len=154,
            global_batch=32,
            tokenizer_vocab=1000,
            validation_fraction=0.05,
            validation_batches=8,
            spans=SpanConfig(),
        ),
        optimizer=OptimizerConfig(peak_lr=2e-3, warmup=40, b2=0.98, final_lr_share=0.05),
        steps=600,
        checkpoint_every=200,
        validate_every=200,
    )


def _digits(seq_len: int) -> DataConfig:
    """Handwritten digits, a fifth of which is held out."""
    return DataConfig(
        images="digits",
        seq_len=seq_len,
        global_batch=64,
        validation_fraction=0.2,
        validation_batches=6,
    )


def vit_digits() -> TrainConfig:
    """A small ViT that tells handwritten digits of 8 x 8 pixels; a minute on two CPU cores."""
    return TrainConfig(
        recipe="vit_digits",
        model=ViTConfig(
            height=8,
            width=8,
            channels=1,
            patch_height=2,
            patch_width=2,
            embed=64,
            layers=4,
            heads=4,
            mlp=128,
            init_std=0.05,
            head=HeadConfig(outputs=10, pool="first"),
        ),
        data=_digits(17),
        optimizer=OptimizerConfig(peak_lr=2e-3, warmup=20, b2=0.98, final_lr_share=0.05),
        steps=400,
        checkpoint_every=200,
        validate_every=100,
    )


def clip_digits() -> TrainConfig:
    """A small CLIP of handwritten digits and their captions; minutes on two CPU cores."""
    sizes = {"heads": 4, "activation": "quick_gelu", "norm_eps": 1e-5}
    return TrainConfig(
        recipe="clip_digits",
        model=CLIPConfig(
            vocab=264,
            max_seq=40,
            eos=256,
            text=EncoderPart(embed=64, layers=2, mlp=128, **sizes),
            image=EncoderPart(embed=64, layers=4, mlp=128, **sizes),
            projection=32,
            height=8,
            width=8,
            channels=1,
            patch_height=2,
            patch_width=2,
            init_std=0.1,
        ),
        data=_digits(40),
        optimizer=OptimizerConfig(peak_lr=2e-3, warmup=20, b2=0.98, final_lr_share=0.05),
        steps=400,
        checkpoint_every=200,
        validate_every=100,
    )


def llava_digits() -> TrainConfig:
    """A small LLaVA that writes what handwritten digits show; minutes on two CPU cores."""
    return TrainConfig(
        recipe="llava_digits",
        model=LlavaConfig(
            text=LlamaConfig(
                vocab=264,
                embed=64,
                layers=2,
                heads=4,
                kv_heads=2,
                mlp=128,
                max_seq=64,
                eos=256,
                init_std=0.05,
            ),
            image=EncoderPart(
                embed=64, layers=3, heads=4, mlp=128, activation="quick_gelu", norm_eps=1e-5
            ),
            image_token=257,
            height=8,
            width=8,
            channels=1,
            patch_height=2,
            patch_width=2,
            init_std=0.05,
        ),
        data=_digits(48),
        optimizer=OptimizerConfig(peak_lr=3e-3, warmup=20, b2=0.98, final_lr_share=0.05),
        steps=400,
        checkpoint_every=200,
        validate_every=100,
    )


def whisper_tones() -> TrainConfig:
    """A small Whisper that writes the names of notes that it hears; minutes on two CPU cores.

    Tokens 0 to 11 are the names, 12 begins a text and 13 ends it.
    """
    return TrainConfig(
        recipe="whisper_tones",
        model=WhisperConfig(
            vocab=16,
            embed=64,
            layers=2,
            decoder_layers=2,
            heads=4,
            decoder_heads=4,
            mlp=128,
            decoder_mlp=128,
            max_source=32,
            max_seq=16,
            init_std=0.05,
            start=12,
            eos=13,
        ),
        data=DataConfig(audio="tones", seq_len=8, global_batch=64, validation_batches=4),
        optimizer=OptimizerConfig(peak_lr=3e-3, warmup=20, b2=0.98, final_lr_share=0.05),
        steps=400,
        checkpoint_every=200,
        validate_every=100,
    )


def finetune() -> TrainConfig:
    """Go on with the model of a checkpoint (`--init`) on your text (`--data`), whatever its size.

    Layers that do not fit `--plan.offload.device_gb` stream from host memory. The model here only
    stands for the checkpoint's.
    """
    return llama_tiny().replace(
        recipe="finetune",
        plan=Plan(
            segments=(Segment(remat="full"),),
            precision=Precision(compute="bfloat16"),
            loss=LossConfig(vocab_chunks=8),
            offload=OffloadConfig(auto=True),
        ),
        data=DataConfig(seq_len=256, global_batch=8, validation_batches=8),
        optimizer=OptimizerConfig(peak_lr=1e-5, warmup=20, final_lr_share=0.1),
        steps=200,
        validate_every=50,
        sample=SampleConfig(),
    )
