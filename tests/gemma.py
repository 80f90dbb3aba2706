"""The Gemma among Flax's own examples, untouched: fetched with the sources of Flax, not kept."""

import contextlib
import functools
import sys
from types import ModuleType
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax

from ci import outside


@functools.cache
def example() -> tuple[ModuleType, ModuleType]:
    """Its modules `transformer` and `transformer_cfg`."""
    folder = str(outside.folder())
    with mock.patch.object(sys, "path", [folder, *sys.path]), _modules_taken_back(folder):
        import transformer
        import transformer_cfg
    return transformer, transformer_cfg


@contextlib.contextmanager
def _modules_taken_back(folder):
    """Names as general as `layers` and `params` stand for nothing afterwards."""
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


SIZES = {
    "num_embed": 128,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "sliding_window_size": 8,
}


def maker(*, layers=3, **sizes):
    """A factory of the third generation's wiring: local and global layers, norms of q and k."""
    transformer, config = example()
    kinds = config.AttentionType.LOCAL_SLIDING, config.AttentionType.GLOBAL
    made = config.TransformerConfig(
        num_layers=layers,
        attention_types=config.make_attention_layers_types(kinds, layers),
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        **{**SIZES, **sizes},
    )
    return lambda rngs: transformer.Transformer(made, rngs=rngs)


def loss(model, batch):
    """Mean cross-entropy of the next tokens, positions and masks as the example makes them."""
    transformer, _ = example()
    valid = jnp.ones(batch["tokens"].shape, bool)
    positions = transformer.build_positions_from_mask(valid)
    mask = transformer.make_causal_attn_mask(valid)
    logits, _ = model(batch["tokens"], positions, None, mask)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def batch(rows, length=16, vocab=SIZES["num_embed"]):
    drawn = np.random.default_rng(0).integers(0, vocab, (2, rows, length), np.int32)
    return {"tokens": drawn[0], "targets": drawn[1]}
