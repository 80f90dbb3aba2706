"""Llama, GPT-J, T5 and OPT in plain Flax NNX, with the parameter trees of their published models.

No dim has a name. `HAND` has what one writes for each by hand: dims by a pattern of the path, from
the first that fits, with `heads` and `mlp` for what a tensor axis splits.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB, WIDTH, HEADS, KV_HEADS, MLP, LAYERS, LONGEST, BUCKETS = 512, 128, 8, 4, 256, 2, 64, 32


def linear(inputs, outputs, rngs, bias=False):
    return nnx.Linear(inputs, outputs, use_bias=bias, rngs=rngs)


def rotated(x, dims):
    """The first of each head's dims turned by their positions."""
    turned, rest = x[..., :dims], x[..., dims:]
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(0, dims, 2) / dims)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(turned, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attended(q, k, v, heads, *, turn=None, causal=True, bias=None):
    """Attention of maps that are not cut into heads yet, [batch, seq, inner] each."""
    size = q.shape[-1] // heads
    q, k, v = (x.reshape(*x.shape[:2], -1, size) for x in (q, k, v))
    if turn:
        q, k = rotated(q, turn), rotated(k, turn)
    out = jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=causal)
    return out.reshape(*out.shape[:2], -1)


class LlamaAttention(nnx.Module):
    def __init__(self, rngs):
        size = WIDTH // HEADS
        self.q_proj = linear(WIDTH, WIDTH, rngs)
        self.k_proj = linear(WIDTH, KV_HEADS * size, rngs)
        self.v_proj = linear(WIDTH, KV_HEADS * size, rngs)
        self.o_proj = linear(WIDTH, WIDTH, rngs)

    def __call__(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(attended(q, k, v, HEADS, turn=WIDTH // HEADS))


class LlamaMLP(nnx.Module):
    def __init__(self, rngs):
        self.gate_proj = linear(WIDTH, MLP, rngs)
        self.up_proj = linear(WIDTH, MLP, rngs)
        self.down_proj = linear(MLP, WIDTH, rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nnx.Module):
    def __init__(self, rngs):
        self.self_attn = LlamaAttention(rngs)
        self.mlp = LlamaMLP(rngs)
        self.input_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    def __init__(self, rngs):
        self.embed_tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([LlamaLayer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.lm_head = linear(WIDTH, VOCAB, rngs)

    def __call__(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class GPTJAttention(nnx.Module):
    def __init__(self, rngs):
        self.k_proj = linear(WIDTH, WIDTH, rngs)
        self.v_proj = linear(WIDTH, WIDTH, rngs)
        self.q_proj = linear(WIDTH, WIDTH, rngs)
        self.out_proj = linear(WIDTH, WIDTH, rngs)

    def __call__(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(attended(q, k, v, HEADS, turn=8))


class GPTJMLP(nnx.Module):
    def __init__(self, rngs):
        self.fc_in = linear(WIDTH, MLP, rngs, bias=True)
        self.fc_out = linear(MLP, WIDTH, rngs, bias=True)

    def __call__(self, x):
        return self.fc_out(jax.nn.gelu(self.fc_in(x)))


class GPTJLayer(nnx.Module):
    def __init__(self, rngs):
        self.ln_1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = GPTJAttention(rngs)
        self.mlp = GPTJMLP(rngs)

    def __call__(self, x):
        normed = self.ln_1(x)
        return x + self.attn(normed) + self.mlp(normed)


class GPTJ(nnx.Module):
    def __init__(self, rngs):
        self.wte = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.h = nnx.List([GPTJLayer(rngs) for _ in range(LAYERS)])
        self.ln_f = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.lm_head = linear(WIDTH, VOCAB, rngs, bias=True)

    def __call__(self, tokens):
        x = self.wte(tokens)
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


class OPTAttention(nnx.Module):
    def __init__(self, rngs):
        self.k_proj = linear(WIDTH, WIDTH, rngs, bias=True)
        self.v_proj = linear(WIDTH, WIDTH, rngs, bias=True)
        self.q_proj = linear(WIDTH, WIDTH, rngs, bias=True)
        self.out_proj = linear(WIDTH, WIDTH, rngs, bias=True)

    def __call__(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(attended(q, k, v, HEADS))


class OPTLayer(nnx.Module):
    def __init__(self, rngs):
        self.self_attn = OPTAttention(rngs)
        self.self_attn_layer_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.fc1 = linear(WIDTH, MLP, rngs, bias=True)
        self.fc2 = linear(MLP, WIDTH, rngs, bias=True)
        self.final_layer_norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(jax.nn.relu(self.fc1(self.final_layer_norm(x))))


class OPT(nnx.Module):
    def __init__(self, rngs):
        self.embed_tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.embed_positions = nnx.Embed(LONGEST + 2, WIDTH, rngs=rngs)
        self.layers = nnx.List([OPTLayer(rngs) for _ in range(LAYERS)])
        self.final_layer_norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed_tokens(tokens) + self.embed_positions(2 + jnp.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.embed_tokens.attend(self.final_layer_norm(x))


class T5Attention(nnx.Module):
    """Heads of 32, together twice the model's width, as in the larger ones."""

    def __init__(self, rngs, biased=False):
        self.q = linear(WIDTH, 2 * WIDTH, rngs)
        self.k = linear(WIDTH, 2 * WIDTH, rngs)
        self.v = linear(WIDTH, 2 * WIDTH, rngs)
        self.o = linear(2 * WIDTH, WIDTH, rngs)
        if biased:
            self.relative_attention_bias = nnx.Embed(BUCKETS, HEADS, rngs=rngs)

    def bias(self, seq):
        """Of the distances between tokens of one row, [1, heads, seq, seq]."""
        apart = jnp.abs(jnp.arange(seq)[:, None] - jnp.arange(seq))
        of_each = self.relative_attention_bias(jnp.minimum(apart, BUCKETS - 1))
        return of_each.transpose(2, 0, 1)[None]

    def __call__(self, x, read, *, causal=False, bias=None):
        q, k, v = self.q(x), self.k(read), self.v(read)
        return self.o(attended(q, k, v, HEADS, causal=causal, bias=bias))


class T5MLP(nnx.Module):
    def __init__(self, rngs):
        self.wi = linear(WIDTH, MLP, rngs)
        self.wo = linear(MLP, WIDTH, rngs)

    def __call__(self, x):
        return self.wo(jax.nn.relu(self.wi(x)))


class T5Layer(nnx.Module):
    def __init__(self, rngs, first, crossed):
        norm = functools.partial(nnx.RMSNorm, WIDTH, rngs=rngs)
        self.SelfAttention = T5Attention(rngs, biased=first)
        self.norms = nnx.List([norm(), norm(), norm()])
        self.crossed = crossed
        if crossed:
            self.EncDecAttention = T5Attention(rngs)
        self.DenseReluDense = T5MLP(rngs)

    def __call__(self, x, bias, read=None):
        y = self.norms[0](x)
        x = x + self.SelfAttention(y, y, causal=self.crossed, bias=bias)
        if self.crossed:
            x = x + self.EncDecAttention(self.norms[1](x), read)
        return x + self.DenseReluDense(self.norms[2](x))


class T5Stack(nnx.Module):
    def __init__(self, rngs, crossed):
        self.block = nnx.List([T5Layer(rngs, not i, crossed) for i in range(LAYERS)])
        self.final_layer_norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x, read=None):
        bias = self.block[0].SelfAttention.bias(x.shape[1])
        for layer in self.block:
            x = layer(x, bias, read)
        return self.final_layer_norm(x)


class T5(nnx.Module):
    def __init__(self, rngs):
        self.shared = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.encoder = T5Stack(rngs, crossed=False)
        self.decoder = T5Stack(rngs, crossed=True)

    def __call__(self, tokens):
        read = self.encoder(self.shared(tokens))
        return self.shared.attend(self.decoder(self.shared(tokens), read))


FAMILIES = {"llama": Llama, "gptj": GPTJ, "t5": T5, "opt": OPT}

HAND = {
    "llama": {
        r"embed_tokens": ("vocab", "embed"),
        r"[qkv]_proj/kernel": ("embed", "heads"),
        r"o_proj/kernel": ("heads", "embed"),
        r"(gate|up)_proj/kernel": ("embed", "mlp"),
        r"down_proj/kernel": ("mlp", "embed"),
        r"lm_head/kernel": ("embed", "vocab"),
        r"norm": (None,),
    },
    "gptj": {
        r"wte": ("vocab", "embed"),
        r"attn/[qkv]_proj/kernel": ("embed", "heads"),
        r"attn/out_proj/kernel": ("heads", "embed"),
        r"fc_in/kernel": ("embed", "mlp"),
        r"fc_in/bias": ("mlp",),
        r"fc_out/kernel": ("mlp", "embed"),
        r"fc_out/bias": ("embed",),
        r"lm_head/kernel": ("embed", "vocab"),
        r"lm_head/bias": ("vocab",),
        r"ln_": (None,),
    },
    "t5": {
        r"shared": ("vocab", "embed"),
        r"relative_attention_bias": (None, "heads"),
        r"Attention/[qkv]/kernel": ("embed", "heads"),
        r"Attention/o/kernel": ("heads", "embed"),
        r"wi/kernel": ("embed", "mlp"),
        r"wo/kernel": ("mlp", "embed"),
        r"norm": (None,),
    },
    "opt": {
        r"embed_tokens": ("vocab", "embed"),
        r"embed_positions": (None, "embed"),
        r"[qkv]_proj/kernel": ("embed", "heads"),
        r"[qkv]_proj/bias": ("heads",),
        r"out_proj/kernel": ("heads", "embed"),
        r"out_proj/bias": ("embed",),
        r"fc1/kernel": ("embed", "mlp"),
        r"fc1/bias": ("mlp",),
        r"fc2/kernel": ("mlp", "embed"),
        r"fc2/bias": ("embed",),
        r"norm": (None,),
    },
}


def next_token(model, batch):
    """Mean cross-entropy of tokens of which each is to be told from those before."""
    logits = model(batch["tokens"][:, :-1])
    wanted = batch["tokens"][:, 1:, None]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), wanted, -1))
