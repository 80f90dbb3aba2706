"""Families: published sizes, JSON, packed rows, lengths, names of parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.errors import InputError
from colossax.models import (
    FAMILIES,
    BARTConfig,
    BERTConfig,
    BloomConfig,
    CLIPConfig,
    CohereConfig,
    DeepSeekV2Config,
    DeepSeekV3Config,
    DINOv2Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    GLM4Config,
    GLMConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GPTOSSConfig,
    Llama4Config,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    MixtralConfig,
    ModernBERTConfig,
    OLMo2Config,
    OLMoEConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoEConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoEConfig,
    RoBERTaConfig,
    SigLIPConfig,
    SmolLM3Config,
    StarCoder2Config,
    T5Config,
    ViTConfig,
    WhisperConfig,
    config_from_json,
    config_to_json,
    family_of,
    maker,
)
from colossax.nn import (
    DropoutConfig,
    DualEncoderConfig,
    EncoderDecoderConfig,
    EncoderPart,
    HeadConfig,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProjectorConfig,
    QueryGrowth,
    SeeingConfig,
    YarnScaling,
    describe,
    pure,
)
from colossax.recipes import recipe
from tests.cases import quick_first
from tests.oracle import assert_trees_close

DEEPSEEK = {
    "vocab": 64,
    "embed": 32,
    "layers": 2,
    "heads": 4,
    "mlp": 48,
    "expert_mlp": 16,
    "experts": 4,
    "choices": 2,
    "shared": 1,
    "first_dense": 1,
    "kv_rank": 16,
    "nope_dim": 8,
    "rope_dim": 4,
    "v_dim": 12,
    "max_seq": 24,
}
SIZES = {"vocab": 64, "embed": 32, "layers": 2, "heads": 4}
GROUPED = {**SIZES, "kv_heads": 2, "mlp": 48, "max_seq": 24}
PAIR = {**SIZES, "mlp": 48, "decoder_layers": 1, "max_seq": 24}
PART = EncoderPart(embed=32, layers=2, heads=4, mlp=48, activation="quick_gelu", norm_eps=1e-5)
TWO = {
    "text": PART,
    "image": PART,
    **dict.fromkeys(("height", "width"), 8),
    **dict.fromkeys(("patch_height", "patch_width"), 4),
    "eos": 5,
}

TINY = {
    "llama": LlamaConfig(**GROUPED),
    "llama3": LlamaConfig(
        **SIZES,
        kv_heads=1,
        head_dim=12,
        mlp=48,
        max_seq=24,
        tied=True,
        rope_scaling=Llama3Scaling(original_max_positions=8),
    ),
    "mistral": MistralConfig(**GROUPED, window=5),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**SIZES, kv_heads=2, head_dim=12, mlp=48, max_seq=24),
    "mixtral": MixtralConfig(**SIZES, kv_heads=2, mlp=16, experts=4, max_seq=24),
    "qwen2_moe": Qwen2MoEConfig(
        **SIZES,
        kv_heads=2,
        mlp=48,
        expert_mlp=16,
        shared_mlp=24,
        experts=4,
        choices=2,
        every=2,
        max_seq=24,
    ),
    "qwen3_moe": Qwen3MoEConfig(
        **SIZES,
        kv_heads=2,
        head_dim=12,
        mlp=48,
        expert_mlp=16,
        experts=4,
        choices=2,
        max_seq=24,
    ),
    "deepseek_v2": DeepSeekV2Config(**DEEPSEEK, q_rank=None),
    "deepseek_v3": DeepSeekV3Config(
        **DEEPSEEK,
        q_rank=24,
        groups=2,
        kept_groups=1,
        rope_scaling=YarnScaling(factor=4.0, original_max_positions=8, mscale_all_dim=1.0),
    ),
    "olmoe": OLMoEConfig(
        **SIZES,
        kv_heads=2,
        mlp=16,
        experts=4,
        choices=2,
        max_seq=24,
    ),
    "gpt_oss": GPTOSSConfig(
        **SIZES,
        kv_heads=2,
        head_dim=12,
        mlp=16,
        experts=4,
        choices=2,
        rope_scaling=YarnScaling(factor=4.0, original_max_positions=16),
        window=5,
        max_seq=24,
    ),
    "llama4_text": Llama4Config(
        **SIZES,
        kv_heads=2,
        head_dim=12,
        mlp=16,
        dense_mlp=24,
        experts=4,
        every=2,
        full_every=2,
        chunk=4,
        query_growth=QueryGrowth(step=3),
        max_seq=24,
    ),
    "gemma2": Gemma2Config(
        **GROUPED,
        head_dim=12,
        score_dim=8,
        window=5,
    ),
    "gemma3_text": Gemma3Config(
        **GROUPED,
        head_dim=12,
        score_dim=8,
        window=5,
        full_every=2,
    ),
    "olmo2": OLMo2Config(**GROUPED),
    "smollm3": SmolLM3Config(**GROUPED, nope_every=2),
    "starcoder2": StarCoder2Config(**GROUPED, window=5),
    "phi3": Phi3Config(
        **GROUPED,
        window=5,
        rope_dims=6,
        rope_scaling=LongScaling(
            short=(1.0, 1.1, 1.2), long=(2.0, 2.5, 3.0), original_max_positions=32
        ),
    ),
    "gpt_neox": GPTNeoXConfig(**SIZES, mlp=48, max_seq=24, rope_dims=4),
    "bert": BERTConfig(**SIZES, mlp=48, max_seq=24),
    "roberta": RoBERTaConfig(**SIZES, mlp=48, max_seq=24),
    "modernbert": ModernBERTConfig(**SIZES, mlp=48, max_seq=24, window=8, full_every=2),
    "t5": T5Config(**PAIR, head_dim=12, buckets=8, farthest=12),
    "bart": BARTConfig(**PAIR, decoder_heads=2, decoder_mlp=40),
    "whisper": WhisperConfig(
        **PAIR, decoder_heads=2, decoder_mlp=40, mels=6, max_source=12, start=1, eos=2
    ),
    "vit": ViTConfig(
        **{name: size for name, size in SIZES.items() if name != "vocab"},
        mlp=48,
        height=8,
        width=12,
        channels=1,
        patch_height=2,
        patch_width=4,
    ),
    "dinov2": DINOv2Config(
        **{name: size for name, size in SIZES.items() if name != "vocab"},
        mlp=48,
        height=8,
        width=12,
        patch_height=4,
        patch_width=4,
        layer_scale=0.5,
        gated=True,
        activation="silu",
    ),
    "clip": CLIPConfig(vocab=64, max_seq=24, projection=16, **TWO),
    "siglip": SigLIPConfig(vocab=64, max_seq=24, **TWO),
    "qwen2_vl": Qwen2VLConfig(
        text=Qwen2Config(**{**GROUPED, "embed": 64}),
        sections=(2, 3, 3),
        image=PART,
        projector=ProjectorConfig(merge=2, norm_eps=1e-6, width=128),
        image_token=63,
        height=8,
        width=8,
        patch_height=2,
        patch_width=2,
    ),
    "llava": LlavaConfig(
        text=LlamaConfig(**GROUPED),
        image=PART,
        image_token=63,
        height=8,
        width=8,
        patch_height=4,
        patch_width=4,
    ),
    "gptj": GPTJConfig(**SIZES, max_seq=24, rope_dims=4),
    "falcon": FalconConfig(**SIZES, max_seq=24),
    "falcon_alibi": FalconConfig(
        **SIZES,
        kv_heads=4,
        max_seq=24,
        alibi=True,
        parallel=False,
        shared_norm=False,
        bias=True,
    ),
    "cohere": CohereConfig(**GROUPED, qk_norm=True),
    "glm": GLMConfig(
        **GROUPED,
        head_dim=12,
        rope_dims=6,
    ),
    "glm4": GLM4Config(
        **GROUPED,
        head_dim=12,
        rope_dims=6,
    ),
    "opt_350m": OPTConfig(**SIZES, mlp=64, max_seq=24, token_width=20, norm_first=False),
    "qwen2_window": Qwen2Config(
        **GROUPED,
        window=5,
        full_first=1,
    ),
    "llama_linear": LlamaConfig(
        **GROUPED,
        rope_scaling=LinearScaling(factor=4.0),
    ),
    "gpt2": GPT2Config(**SIZES, mlp=64, max_seq=24),
    "opt": OPTConfig(**SIZES, mlp=64, max_seq=24),
    "bloom": BloomConfig(**SIZES, max_seq=24),
}

DEAR = (
    *("deepseek_v2", "deepseek_v3", "gemma2", "olmo2", "smollm3", "starcoder2", "phi3", "gpt_neox"),
    *("falcon", "falcon_alibi", "glm", "glm4", "qwen2_window", "llama_linear"),
    *("olmoe", "qwen3_moe", "roberta", "opt_350m", "qwen3", "llama3"),
)
"""Whose parts are in the core by other families."""


BASE = {"layers": 12, "activation": "quick_gelu", "norm_eps": 1e-5}
PUBLISHED = [
    (
        LlamaConfig(vocab=32000, embed=4096, layers=32, heads=32, kv_heads=32, mlp=11008),
        6_738_415_616,
    ),
    (
        LlamaConfig(vocab=128256, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336),
        8_030_261_248,
    ),
    (
        LlamaConfig(vocab=128256, embed=8192, layers=80, heads=64, kv_heads=8, mlp=28672),
        70_553_706_496,
    ),
    (
        MistralConfig(vocab=32000, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336),
        7_241_732_096,
    ),
    (
        Qwen2Config(vocab=151936, embed=896, layers=24, heads=14, kv_heads=2, mlp=4864, tied=True),
        494_032_768,
    ),
    (
        Qwen3Config(vocab=151936, embed=1024, layers=28, heads=16, kv_heads=8, mlp=3072),
        596_049_920,
    ),
    (
        Qwen2MoEConfig(
            vocab=151936,
            embed=2048,
            layers=24,
            heads=16,
            kv_heads=16,
            mlp=5632,
            expert_mlp=1408,
            shared_mlp=5632,
            experts=60,
            choices=4,
        ),
        14_315_784_192,
    ),
    (
        DeepSeekV2Config(
            vocab=102400,
            embed=2048,
            layers=27,
            heads=16,
            mlp=10944,
            expert_mlp=1408,
            experts=64,
            choices=6,
            shared=2,
            first_dense=1,
            q_rank=None,
        ),
        15_706_484_224,
    ),
    # Of it 58 biases of 256 experts each.
    (recipe("deepseek_v3").model, 671_026_404_352 + 58 * 256),
    (
        OLMoEConfig(vocab=50304, embed=2048, layers=16, heads=16, kv_heads=16, mlp=1024),
        6_919_161_856,
    ),
    (
        GPTOSSConfig(
            vocab=201088, embed=2880, layers=24, heads=64, kv_heads=8, mlp=2880, experts=32
        ),
        20_914_757_184,
    ),
    (
        Llama4Config(
            vocab=202048,
            embed=5120,
            layers=48,
            heads=40,
            kv_heads=8,
            mlp=8192,
            dense_mlp=16384,
        ),
        107_769_861_120,
    ),
    (
        Gemma2Config(vocab=256000, embed=2304, layers=26, heads=8, kv_heads=4, mlp=9216),
        2_614_341_888,
    ),
    (
        Gemma3Config(vocab=262144, embed=1152, layers=26, heads=4, kv_heads=1, mlp=6912),
        999_885_952,
    ),
    (
        OLMo2Config(vocab=100352, embed=4096, layers=32, heads=32, kv_heads=32, mlp=11008),
        7_298_617_344,
    ),
    (
        SmolLM3Config(vocab=128256, embed=2048, layers=36, heads=16, kv_heads=4, mlp=11008),
        3_075_098_624,
    ),
    (
        StarCoder2Config(vocab=49152, embed=3072, layers=30, heads=24, kv_heads=2, mlp=12288),
        3_030_371_328,
    ),
    (
        Phi3Config(vocab=32064, embed=3072, layers=32, heads=32, kv_heads=32, mlp=8192),
        3_821_079_552,
    ),
    (
        GPTNeoXConfig(vocab=50432, embed=6144, layers=44, heads=64, mlp=24576),
        20_554_567_680,
    ),
    (GPTJConfig(vocab=50400, embed=4096, layers=28, heads=16), 6_050_882_784),
    (FalconConfig(vocab=65024, embed=4544, layers=32, heads=71), 6_921_720_704),
    (
        CohereConfig(vocab=256000, embed=8192, layers=40, heads=64, kv_heads=64, mlp=22528),
        34_980_831_232,
    ),
    (
        GLMConfig(vocab=151552, embed=4096, layers=40, heads=32, kv_heads=2, mlp=13696),
        9_399_951_360,
    ),
    (
        OPTConfig(
            vocab=50272,
            embed=1024,
            layers=24,
            heads=16,
            mlp=4096,
            token_width=512,
            norm_first=False,
        ),
        331_196_416,
    ),
    (GPT2Config(vocab=50257, embed=768, layers=12, heads=12, mlp=3072), 124_439_808),
    (BERTConfig(vocab=30522, embed=768, layers=12, heads=12, mlp=3072), 109_514_298),
    (RoBERTaConfig(vocab=50265, embed=768, layers=12, heads=12, mlp=3072), 124_697_433),
    (
        T5Config(
            vocab=32128,
            embed=512,
            layers=6,
            decoder_layers=6,
            heads=8,
            head_dim=64,
            mlp=2048,
        ),
        60_506_624,
    ),
    (
        BARTConfig(
            vocab=50265,
            embed=1024,
            layers=12,
            decoder_layers=12,
            heads=16,
            decoder_heads=16,
            mlp=4096,
            decoder_mlp=4096,
        ),
        406_291_456 + 50265,
    ),
    # Its encoder's 1,500 positions are sines and cosines, stored all the same.
    (
        WhisperConfig(
            vocab=51865,
            embed=384,
            layers=4,
            decoder_layers=4,
            heads=6,
            decoder_heads=6,
            mlp=1536,
            decoder_mlp=1536,
        ),
        37_760_640,
    ),
    (ModernBERTConfig(vocab=50368, embed=768, layers=22, heads=12, mlp=1152), 149_655_232),
    (OPTConfig(vocab=50272, embed=768, layers=12, heads=12, mlp=3072), 125_239_296),
    (
        ViTConfig(
            embed=768,
            layers=12,
            heads=12,
            mlp=3072,
            head=HeadConfig(outputs=1000, pool="first"),
        ),
        86_567_656,
    ),
    (
        DINOv2Config(height=518, width=518, embed=768, layers=12, heads=12, mlp=3072),
        86_580_480 - 768,  # without the token that stands for a masked patch
    ),
    (
        CLIPConfig(
            text=EncoderPart(embed=512, heads=8, mlp=2048, **BASE),
            image=EncoderPart(embed=768, heads=12, mlp=3072, **BASE),
            patch_height=32,
            patch_width=32,
        ),
        151_277_313,
    ),
    (
        SigLIPConfig(
            text=EncoderPart(embed=768, heads=12, mlp=3072, **BASE),
            image=EncoderPart(embed=768, heads=12, mlp=3072, **BASE),
        ),
        203_155_970,
    ),
    (
        LlavaConfig(
            text=LlamaConfig(vocab=32064, embed=4096, layers=32, heads=32, kv_heads=32, mlp=11008),
            image=EncoderPart(embed=1024, heads=16, mlp=4096, **{**BASE, "layers": 23}),
        ),
        7_063_427_072 - 12_598_272,  # without the layer and the norm that nothing reads
    ),
    (BloomConfig(vocab=250880, embed=1024, layers=24, heads=16), 559_214_592),
]


@pytest.mark.parametrize(
    ("config", "parameters"),
    quick_first(PUBLISHED, 3),
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_published_parameter_counts(config, parameters):
    """Traced only: the largest would not fit this machine."""
    assert describe(maker(config)).parameter_count() == parameters


@pytest.mark.parametrize("name", TINY)
def test_configuration_round_trips_through_json(name):
    config = TINY[name]
    data = config_to_json(config)
    assert data["family"] == family_of(config).name
    assert config_from_json(data) == config


def test_every_family_has_a_row_here():
    assert {family_of(config).name for config in TINY.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"family": "lama"}, "no family is called 'lama'; did you mean 'llama'"),
        ({"family": "gpt2", "hidden": 3}, "gpt2 config: unknown field 'hidden'"),
        ({}, "no family is called None"),
    ],
)
def test_bad_configurations_are_refused(data, message):
    with pytest.raises(InputError, match=message):
        config_from_json(data)


OTHERS = (EncoderDecoderConfig, DualEncoderConfig, ViTConfig)
TEXTS = [name for name in TINY if not isinstance(TINY[name], OTHERS)]
"""Those that read no source and no images; of the others see tests/step/test_encoder_decoders.py
test_images.py and test_image_text.py."""

QUICK = [name for name in TEXTS if name not in DEAR][::2]


@functools.cache
def built(name):
    """Parameters and forward pass of a family; both tests below give it the same shapes."""
    model = maker(TINY[name])(nnx.Rngs(0))
    graphdef, params = nnx.split(model)[0], pure(model)
    run = jax.jit(lambda params, tokens, **where: nnx.merge(graphdef, params)(tokens, **where))
    return params, run


def as_rows(tokens, cut, length=11):
    """Two documents as rows of one length, and which of their tokens fill them up."""
    rows = [tokens[0, :cut], tokens[0, cut:]]
    filled = jnp.stack([jnp.arange(length) >= len(row) for row in rows])
    rows = jnp.stack([jnp.pad(row, (0, length - len(row))) for row in rows])
    return {"tokens": rows, "segments": -filled.astype(jnp.int32)}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_first(TEXTS, QUICK))
def test_packed_documents_do_not_see_each_other(name):
    """A row of two documents gives each the logits it has alone."""
    params, run = built(name)
    tokens = jax.random.randint(jax.random.key(1), (1, 20), 0, 64)
    segments = jnp.asarray([[0] * 9 + [1] * 11])
    positions = jnp.asarray([[*range(9), *range(11)]])
    # Twenty times the initial deviation, so that attention is far from uniform.
    params = jax.tree.map(lambda leaf: leaf * (1 if leaf.ndim < 3 else 20), params)
    packed = run(params, tokens, positions=positions, segments=segments)
    apart = run(params, **as_rows(tokens, 9))
    assert_trees_close(packed[0], jnp.concatenate([apart[0, :9], apart[1]]), tolerance=2e-5)
    joined = run(params, tokens)
    assert np.abs(joined[:, 9:] - packed[:, 9:]).max() > 1e-3


def test_an_encoder_sees_what_comes_behind():
    """And a decoder does not."""
    tokens = jax.random.randint(jax.random.key(1), (1, 20), 0, 64)
    for name, sees in (("bert", True), ("modernbert", True), ("gpt2", False)):
        params, run = built(name)
        moved = np.abs(run(params, tokens.at[0, 10].add(1)) - run(params, tokens)).max(-1)[0]
        assert (moved[9] > 0) == sees
        assert moved[10] > 0


@pytest.mark.parametrize("name", quick_first(TEXTS, QUICK))
def test_flat_tokens_with_positions_and_segments_equal_rows(name):
    params, run = built(name)
    tokens = jax.random.randint(jax.random.key(1), (1, 20), 0, 64)
    positions = jnp.tile(jnp.arange(10), 2)[None]
    flat = run(params, tokens, positions=positions, segments=jnp.repeat(jnp.arange(2), 10)[None])
    rows = run(params, **as_rows(tokens, 10))[:, :10]
    assert_trees_close(flat.reshape(2, 10, -1), rows, tolerance=2e-5)


def test_embeddings_may_take_the_place_of_tokens():
    model = maker(TINY["llama"])(nnx.Rngs(0))
    tokens = jnp.arange(8)[None]
    got, _ = model.hidden(embeddings=model.embed(tokens))
    np.testing.assert_allclose(got, model.hidden(tokens)[0], rtol=1e-6)
    with pytest.raises(InputError, match="give either tokens or embeddings"):
        model.hidden()


def test_a_sequence_above_the_models_is_refused():
    model = maker(TINY["gpt2"])(nnx.Rngs(0))
    with pytest.raises(InputError, match="sequence length 25 is above the model's 24"):
        model.hidden(jnp.zeros((1, 25), jnp.int32))


def test_heads_that_kv_heads_do_not_divide_are_refused():
    with pytest.raises(InputError, match="4 heads cannot share 3 kv heads evenly"):
        maker(LlamaConfig(vocab=8, embed=8, layers=1, heads=4, kv_heads=3, mlp=8))(nnx.Rngs(0))


def test_an_odd_head_dim_under_rope_is_refused():
    with pytest.raises(InputError, match="pairs of a head's dims, and 3 of head_dim 3 are to turn"):
        maker(LlamaConfig(vocab=8, embed=12, layers=1, heads=4, kv_heads=4, mlp=8))(nnx.Rngs(0))


def test_names_of_parameters():
    infos = jax.tree.leaves(describe(maker(TINY["qwen2"])).infos)
    names = {info.path: info.dims for info in infos}
    assert names["layers/attn/q/w"] == ("layers", "embed", "heads", "head_dim")
    assert names["layers/attn/k/b"] == ("layers", "kv_heads", "head_dim")
    assert names["layers/mlp/down/w"] == ("layers", "mlp", "embed")
    assert names["embed/table"] == ("vocab", "embed:table")
    assert names["head/w"] == ("embed", "vocab")


def test_names_of_latent_parameters():
    infos = jax.tree.leaves(describe(maker(TINY["deepseek_v3"])).infos)
    names = {
        info.path.removeprefix("layers/sparse/"): tuple(d for d in info.dims if d != "layers")
        for info in infos
    }
    assert names["attn/q_down/w"] == ("embed", "q_latent")
    assert names["attn/q_up/w"] == ("q_latent", "heads", "head_dim")
    assert names["attn/kv_down/w"] == ("embed", "kv_latent")
    assert names["attn/kv_up/w"] == ("kv_latent", "heads", "head_dim")
    assert names["attn/kv_norm/scale"] == ("kv_latent",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_dim": 5}, "rope turns pairs of dims, found 5"),
        ({"groups": 4}, "4 groups of 4 experts have one each; give at most 2"),
        ({"groups": 3}, "3 groups do not divide 4 experts"),
    ],
)
def test_sizes_of_deepseek_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TINY["deepseek_v3"], **changes)


@pytest.mark.parametrize("name", TINY)
def test_dropout_reaches_each_stack(name):
    dropout = DropoutConfig(residual=0.1)
    if isinstance(TINY[name], DualEncoderConfig | SeeingConfig):
        with pytest.raises(InputError, match="model.dropout: "):
            dataclasses.replace(TINY[name], dropout=dropout)
        return
    config = dataclasses.replace(TINY[name], dropout=dropout)
    stacks = [config.decoder()]
    if isinstance(config, EncoderDecoderConfig):
        stacks.append(config.encoder())
    assert {stack.dropout for stack in stacks} == {dropout}
