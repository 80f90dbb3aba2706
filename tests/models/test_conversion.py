"""Layouts of foreign tensors and settings of config.json."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.errors import InputError
from colossax.models import conversion
from colossax.models.conversions import CONVERSIONS
from colossax.models.hf_folder import by_path, conversion_of, open_folder
from colossax.models.layouts import PART, Layout
from colossax.models.registry import FAMILIES, maker
from colossax.models.rope_settings import read_rope_dims, rope_share
from colossax.nn import YarnScaling, describe
from tests.cases import quick_first

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


ALIKE = [("gelu_pytorch_tanh", "gelu_fast")]
"""Values of settings that say the same: what is written, and what a case has."""


NOT_KEPT = {
    "dinov2": {"use_mask_token"},
    "llava": {"vision_feature_layer", "num_hidden_layers"},
    "whisper": {"bos_token_id"},
}
"""Settings of what is left aside: a token of masked patches, layers behind the one that is read,
and a token that no text begins with; published files have there what ends a text."""


def settings_of(case):
    return json.loads((GOLDEN / case / "config.json").read_text())


def test_layout_splits_side_by_side_and_head_by_head():
    heads, size, embed = 2, 3, 4
    sizes = {"embed": embed, "heads": heads, "head_dim": size, PART: 3}
    dims = ("embed", "heads", "head_dim")
    beside = np.arange(embed * 3 * heads * size).reshape(embed, -1)
    by_head = np.arange(3 * heads * size * embed).reshape(-1, embed)
    first = Layout("embed (part heads head_dim)").ours(beside, dims, sizes)
    second = Layout("(heads part head_dim) embed").ours(by_head, dims, sizes)
    for part in range(3):
        for e in range(embed):
            for n in range(heads):
                for h in range(size):
                    column = part * heads * size + n * size + h
                    assert first[part][e, n, h] == beside[e, column]
                    row = n * 3 * size + part * size + h
                    assert second[part][e, n, h] == by_head[row, e]


@given(st.permutations(["embed", "heads", "head_dim"]), st.permutations(["embed", "heads", PART]))
def test_layout_there_and_back(ours, fused):
    sizes = {"embed": 2, "heads": 3, "head_dim": 5, PART: 3}
    for text in ("(heads head_dim) embed", f"({' '.join(fused)}) head_dim"):
        layout = Layout(text)
        foreign = np.arange(np.prod(layout.shape(sizes))).reshape(layout.shape(sizes))
        arrays = layout.ours(foreign, ours, sizes)
        assert all(a.shape == tuple(sizes[d] for d in ours) for a in arrays)
        np.testing.assert_array_equal(layout.foreign(arrays, ours), foreign)


@pytest.mark.catches("values-before-keys")
def test_layout_of_parts_of_unlike_sizes():
    """All queries, then keys and values; or with each kv head its queries, key and value."""
    groups, each, size, embed = 2, 3, 2, 5
    heads = groups * each
    sizes = {"embed": embed, "heads": heads, "kv_heads": groups, "head_dim": size}
    dims = ("embed", "heads", "head_dim")
    foreign = np.arange((heads + 2 * groups) * size * embed).reshape(-1, embed)
    beside = Layout("(heads|kv_heads|kv_heads head_dim) embed")
    grouped = Layout("(kv_heads heads/kv_heads|1|1 head_dim) embed")
    for layout in (beside, grouped):
        q, k, v = layout.ours(foreign, dims, sizes)
        assert q.shape == (embed, heads, size) and k.shape == v.shape == (embed, groups, size)
        np.testing.assert_array_equal(layout.foreign((q, k, v), dims), foreign)
        for head in range(heads):
            group, within = divmod(head, each)
            row = head if layout is beside else group * (each + 2) + within
            np.testing.assert_array_equal(q[:, head, 1], foreign[row * size + 1])
        for group in range(groups):
            row = heads + group if layout is beside else group * (each + 2) + each
            np.testing.assert_array_equal(k[:, group, 0], foreign[row * size])
            row = row + groups if layout is beside else row + 1
            np.testing.assert_array_equal(v[:, group, 0], foreign[row * size])


def test_every_family_has_a_table():
    assert {type_.config for type_ in CONVERSIONS.values()} == {f.config for f in FAMILIES.values()}


@pytest.mark.parametrize("case", quick_first(CASES, 5))
def test_blocks_cover_each_tensor_once(case, monkeypatch):
    source = open_folder(GOLDEN / case)
    monkeypatch.setattr(conversion, "BLOCK_BYTES", 700)
    several = 0
    for tensor in source.tensors:
        blocks = list(tensor.blocks(4))
        several += len(blocks) > 1
        foreign = np.arange(np.prod(tensor.shape)).reshape(tensor.shape)
        arrays = [np.zeros(shape) for shape in tensor.shapes]
        for block in blocks:
            rows = foreign
            if tensor.shape:
                rows = foreign[block.first_row : block.first_row + block.rows]
            for array, part in zip(arrays, block.ours(rows), strict=True):
                array[block.index] += part
        assert [b.first_row for b in blocks[1:]] == list(np.cumsum([b.rows for b in blocks])[:-1])
        found = np.concatenate([np.atleast_1d(block.foreign(arrays)) for block in blocks])
        np.testing.assert_array_equal(found, np.atleast_1d(foreign))
    assert several > 5


@pytest.mark.parametrize("case", CASES)
def test_settings_there_and_back(case):
    settings = settings_of(case)
    table = conversion_of(settings)
    config = table.config_from(settings)
    written = json.loads(json.dumps(table.settings_of(config)))
    assert table.config_from(written) == config
    apart = {"rope_parameters", "n_inner", "pad_token_id"}
    apart |= NOT_KEPT.get(settings["model_type"], set())
    # `transformers` 5 says that T5 1.1 is tied and its outputs not scaled; before, that it is not.
    apart |= {"tie_word_embeddings"} if settings.get("scale_decoder_outputs") is False else set()
    assert_alike(written, settings, apart)


def assert_alike(written, settings, apart):
    """What both say is the same, in objects of settings too."""
    for name in set(written) & set(settings) - apart:
        one, other = written[name], settings[name]
        if isinstance(one, dict) and isinstance(other, dict):
            assert_alike(one, other, apart)
        else:
            assert (one, other) in ALIKE or one == other, name


def llama(**changes):
    settings = {**settings_of("llama"), **changes}
    for name in [name for name, value in settings.items() if value is ...]:
        del settings[name]
    return CONVERSIONS["llama"].config_from(settings)


@pytest.mark.catches("rope-theta-forgotten")
def test_both_ages_of_rope_settings():
    new = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    new |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = {name: value for name, value in new.items() if name != "rope_theta"}
    modern = llama(rope_parameters=new)
    assert llama(rope_parameters=..., rope_theta=5e5, rope_scaling=old) == modern
    assert modern.rope_theta == 5e5
    assert modern.rope_scaling.original_max_positions == 8192
    assert llama(rope_parameters=...).rope_theta == 10_000.0


def test_older_files_of_deepseek_say_the_same():
    """Rope as the published config.json has it, integers for floats among them."""
    settings = settings_of("deepseek_v2")
    rope = dict(settings.pop("rope_parameters"))
    theta, rope["type"] = rope.pop("rope_theta"), rope.pop("rope_type")
    rope |= {"factor": 4, "beta_fast": 32, "beta_slow": 1}
    older = settings | {"rope_scaling": rope, "rope_theta": theta, "ep_size": 1, "seq_aux": True}
    older |= {"scoring_func": "softmax", "moe_layer_freq": 1, "aux_loss_alpha": 0.001}
    table = CONVERSIONS["deepseek_v2"]
    assert table.config_from(older) == table.config_from(settings_of("deepseek_v2"))


def test_missing_settings_take_the_defaults_of_transformers():
    config = llama(
        num_key_value_heads=..., head_dim=None, rms_norm_eps=..., tie_word_embeddings=...
    )
    assert (config.kv_heads, config.head_dim, config.norm_eps, config.tied) == (
        4,
        None,
        1e-6,
        False,
    )
    gpt2 = CONVERSIONS["gpt2"].config_from(
        {"vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2}
    )
    assert (gpt2.mlp, gpt2.max_seq, gpt2.tied) == (32, 1024, True)
    old_bloom = {"vocab_size": 9, "n_embed": 8, "n_layer": 1, "num_attention_heads": 2}
    assert CONVERSIONS["bloom"].config_from(old_bloom).embed == 8
    mistral = {k: v for k, v in settings_of("mistral").items() if k != "sliding_window"}
    assert CONVERSIONS["mistral"].config_from(mistral).window == 4096
    assert llama(eos_token_id=[7, 8]).eos == 7
    assert llama(eos_token_id=...).eos is None


def without(case, *names):
    """Settings of a golden case that say nothing of these."""
    return {name: value for name, value in settings_of(case).items() if name not in names}


@pytest.mark.catches("mixtral-theta-of-llama")
@pytest.mark.catches("gpt-oss-without-yarn")
@pytest.mark.catches("deepseek-v3-scale-of-v2")
def test_missing_settings_of_families_with_experts_take_their_own_defaults():
    mixtral = without("mixtral", "rms_norm_eps", "rope_parameters")
    found = CONVERSIONS["mixtral"].config_from(mixtral)
    assert (found.norm_eps, found.rope_theta) == (1e-5, 1e6)
    assert CONVERSIONS["mixtral"].config_from({**mixtral, "rope_theta": 7}).rope_theta == 7.0
    deepseek = without("deepseek_v3", "routed_scaling_factor", "first_k_dense_replace")
    found = CONVERSIONS["deepseek_v3"].config_from({**deepseek, "num_hidden_layers": 4})
    assert (found.scale, found.first_dense) == (2.5, 3)
    v2 = without("deepseek_v2", "routed_scaling_factor", "first_k_dense_replace")
    found = CONVERSIONS["deepseek_v2"].config_from(v2)
    assert (found.scale, found.first_dense) == (1.0, 0)
    table, nothing = CONVERSIONS["gpt_oss"], without("gpt_oss", "rope_parameters")
    yarn = YarnScaling(factor=32.0, original_max_positions=4096, truncate=False)
    for said in ({}, {"rope_parameters": None}):
        found = table.config_from({**nothing, **said})
        assert (found.rope_theta, found.rope_scaling) == (150_000.0, yarn)
    plain = table.config_from({**nothing, "rope_parameters": {"rope_type": "default"}})
    assert (plain.rope_theta, plain.rope_scaling) == (150_000.0, None)
    older = table.config_from({**nothing, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    assert older.rope_scaling == YarnScaling(factor=2.0, original_max_positions=128)


@pytest.mark.catches("alone-and-untaught")
@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_a_single_choice_without_a_loss_is_imported_with_the_family_s_own(case):
    """Where its weight is always 1; else the file's 0 stays."""
    table, choice = CONVERSIONS[case], {"num_experts_per_tok": 1, "router_aux_loss_coef": 0.0}
    settings = settings_of(case) | choice
    found = table.config_from(settings | {"norm_topk_prob": True})
    assert found.balance_loss == (0.01 if case == "olmoe" else 0.001)
    assert table.config_from(settings | {"num_experts_per_tok": 2}).balance_loss == 0.0
    if "renormalise" in {entry.ours for entry in table.settings}:
        assert table.config_from(settings | {"norm_topk_prob": False}).balance_loss == 0.0


def test_the_published_scaling_of_llama_4_is_read():
    """Of Scout: both factors are one."""
    rope = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    settings = without("llama4_text", "rope_parameters") | {"rope_scaling": rope}
    found = CONVERSIONS["llama4_text"].config_from(settings)
    assert (found.rope_theta, found.rope_scaling.factor) == (500_000.0, 16.0)
    assert CONVERSIONS["llama4_text"].settings_of(found)["rope_scaling"] == rope


REFUSED = [
    (
        "llama",
        {"hidden_act": "gelu"},
        "llama with hidden_act = 'gelu' is not supported; only 'silu'",
    ),
    ("llama", {"hidden_size": ...}, "'hidden_size' is missing"),
    ("llama", {"vocab_size": "128"}, "'vocab_size' is '128'; it must be int"),
    ("llama", {"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1; it must be bool"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "other", "rope_theta": 1e4, "factor": 2.0}},
        "rope scaling 'other' is not supported; only 'default' or 'linear' or 'dynamic' or",
    ),
    ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "rope scaling dynamic lacks 'factor'"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 0.5}},
        "model.rope_scaling.factor: found 0.5, with which the base would become negative; give 1",
    ),
    (
        "phi3_long",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        "1 divisors for 4 frequencies; give one for each",
    ),
    (
        "phi3_long",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2, 2]}},
        "1 divisors for short documents and 2 for long ones",
    ),
    (
        "phi3",
        {"rope_parameters": {"partial_rotary_factor": 0.01}},
        "'partial_rotary_factor' is 0.01, by which 0 of 16 dims turn; give a share above 0",
    ),
    ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "llama3 lacks 'factor'"),
    (
        "qwen2_window",
        {"layer_types": ["sliding_attention", "full_attention"]},
        "layer_types with 'full_attention' after 'sliding_attention' are not supported; only first",
    ),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
    ("smollm3", {"no_rope_layers": [0, 1]}, "no_rope_layers with layers 0 that have no rope are"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not"),
    (
        "gemma3",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        "layer_types with layers 0 that see all keys are not supported; only each so many-th",
    ),
    ("gpt_neox", {"hidden_act": "tanh"}, "hidden_act = 'tanh' is not supported; only 'gelu' or"),
    ("gpt_neox", {"hidden_act": ["gelu"]}, r"'hidden_act' is \['gelu'\]; it must be str"),
    ("gptj", {"rotary_dim": 10}, "and 10 of head_dim 8 are to turn; choose an even number of them"),
    (
        "falcon",
        {"parallel_attn": False, "new_decoder_architecture": True},
        "two norms with the new",
    ),
    ("cohere", {"logit_scale": 0.0}, "'logit_scale': found 0.0; give a number above 0"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "'full_attention' among others"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "'noaux_tc' is not supported; only 'greedy' or"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported; only"),
    ("deepseek_v2", {"rope_parameters": {"rope_type": "yarn"}}, "yarn lacks 'factor'"),
    ("deepseek_v2", {"rope_parameters": {"rope_type": "linear"}}, "only 'default' or 'yarn' is"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias = True is not supported"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported; only 1 is"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "convert them to bfloat16"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
    ("deepseek_v3", {"n_group": 8}, "8 groups of 8 experts have one each; give at most 4"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported; only None is"),
    ("olmoe", {"num_experts_per_tok": 9}, "9 experts of a token, and there are 8; give at most 8"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0 is not supported; only 7.0 is"),
    (
        "gpt_oss",
        {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
        "layer_types with layers 0, 3 that see all keys are not supported; only full_attention in",
    ),
    (
        "gpt_oss",
        {"rope_parameters": ..., "rope_scaling": None},
        "rope_scaling is null, which readers take for no scaling or for YaRN's; say which",
    ),
    (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}},
        "model.rope.theta: found 1.0, with which YaRN's scaling finds no dims to stretch; give",
    ),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
    (
        "gpt_oss",
        {"layer_types": ["linear_attention"] * 4},
        "layer_types with 'linear_attention' is not supported; only 'sliding_attention' or",
    ),
    (
        "gpt_oss",
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config with quant_method = 'fp8' is not supported; only 'mxfp4' is",
    ),
    ("llama4_text", {"moe_layers": [0, 3]}, r"moe_layers = \[0, 3\] and more, apart from"),
    ("llama4_text", {"no_rope_layers": [0, 1, 1, 0]}, "no_rope_layers with layers 0, 3 that see"),
    (
        "llama4_text",
        {"layer_types": ["full_attention"] * 4},
        "layer_types apart from no_rope_layers are not supported",
    ),
    ("llama4_text", {"vision_config": {"depth": 2}}, "llama4_text with vision_config is not"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    ("opt", {"enable_bias": False}, "enable_bias = False is not supported; only True is"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm = True"),
]


@pytest.mark.catches("rope-partial")
@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_settings_refused(case, changes, message):
    settings = {**settings_of(case), **changes}
    settings = {name: value for name, value in settings.items() if value is not ...}
    with pytest.raises(InputError, match="config.json: .*" + message):
        conversion_of(settings).config_from(settings)


def test_unknown_model_type_lists_the_known_ones():
    with pytest.raises(InputError, match="'mamba' is not among .* known: llama, mistral, mixtral"):
        conversion_of({"model_type": "mamba"})


@pytest.mark.catches("su-is-no-longrope")
def test_older_names_of_settings():
    """What files said before: longrope's first name, a pattern in place of a list, two bases."""
    rope = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = without("phi3_long", "rope_parameters") | {"rope_scaling": rope, "num_attention_heads": 4}
    found = CONVERSIONS["phi3"].config_from(phi)
    assert found.rope_scaling.long == (2.0,) * 4
    factor = 128 / found.rope_scaling.original_max_positions
    assert found.rope_scaling.magnitude == pytest.approx((1 + np.log(factor) / np.log(10)) ** 0.5)
    gemma = without("gemma3", "rope_parameters", "layer_types")
    gemma |= {"sliding_window_pattern": 3, "rope_theta": 5e5, "rope_local_base_freq": 40.0}
    found = CONVERSIONS["gemma3_text"].config_from(gemma)
    assert (found.full_every, found.rope_theta, found.local_theta) == (3, 5e5, 40.0)
    neox = without("gpt_neox", "rope_parameters") | {"rotary_pct": 0.25, "rotary_emb_base": 7}
    found = CONVERSIONS["gpt_neox"].config_from(neox)
    assert (found.rope_dims, found.rope_theta) == (2, 7.0)


def test_a_scaling_by_length_says_how_long_a_row_may_be():
    rope = {"rope_type": "dynamic", "factor": 4.0}
    found = llama(rope_parameters=rope, max_position_embeddings=16)
    assert (found.max_seq, found.rope_scaling.original_max_positions) == (64, 16)
    assert CONVERSIONS["llama"].settings_of(found)["max_position_embeddings"] == 16


def test_the_share_of_a_head_that_turns_is_read_as_it_was_written():
    for head_dim in range(2, 257, 2):
        for dims in range(2, head_dim + 1, 2):
            settings = {"partial_rotary_factor": rope_share(dims, head_dim)}
            assert read_rope_dims(settings, head_dim) == dims


def test_opt_with_another_eps_has_no_place_in_the_format():
    config = dataclasses.replace(open_folder(GOLDEN / "opt").config, norm_eps=1e-6)
    with pytest.raises(InputError, match="norm_eps = 1e-06 cannot be exported"):
        CONVERSIONS["opt"].settings_of(config)


def test_one_layer_models_are_not_stacked():
    config = dataclasses.replace(open_folder(GOLDEN / "llama").config, layers=1)
    tensors = CONVERSIONS["llama"].tensors(by_path(describe(maker(config))))
    layers = [tensor for tensor in tensors if ".layers." in tensor.name]
    assert {tensor.layer for tensor in layers} == {0}
    assert {t.name: t.shape for t in layers}["model.layers.0.self_attn.q_proj.weight"] == (32, 32)
