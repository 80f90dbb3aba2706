"""Models of plain Flax NNX, as people bring them: no dim has a name."""

import jax
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width, heads, *, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs, vocab=64, width=32, heads=4):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (8, width)))
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ViT(nnx.Module):
    def __init__(self, rngs, width=32):
        self.patch = nnx.Conv(3, width, (4, 4), strides=(4, 4), rngs=rngs)
        self.pos_embedding = nnx.Param(jnp.zeros((1, 16, width)))
        self.blocks = nnx.Sequential(Block(width, 4, rngs=rngs))
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images):
        x = self.patch(images)
        x = x.reshape(len(x), -1, x.shape[-1]) + self.pos_embedding[...]
        return self.head(self.blocks(x).mean(1))


class Convolved(nnx.Module):
    def __init__(self, inputs, outputs, *, rngs):
        self.norm = nnx.GroupNorm(inputs, num_groups=1, rngs=rngs)
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), rngs=rngs)
        self.skip = nnx.Conv(inputs, outputs, (1, 1), rngs=rngs)

    def __call__(self, x):
        return self.skip(x) + self.conv2(jax.nn.silu(self.conv1(self.norm(x))))


class UNet(nnx.Module):
    def __init__(self, rngs, width=16):
        self.first = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.down = Convolved(width, 2 * width, rngs=rngs)
        self.up = nnx.ConvTranspose(2 * width, width, (2, 2), strides=(2, 2), rngs=rngs)
        self.joined = Convolved(2 * width, width, rngs=rngs)
        self.last = nnx.Conv(width, 3, (1, 1), rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        low = self.down(nnx.avg_pool(x, (2, 2), strides=(2, 2)))
        return self.last(self.joined(jnp.concatenate([x, self.up(low)], -1)))


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(48, 32, rngs=rngs)
        self.second = nnx.Linear(32, 16, rngs=rngs)
        self.third = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.third(jax.nn.relu(self.second(jax.nn.relu(self.first(x)))))


class OwnEinsum(nnx.Module):
    """As the Gemma among Flax's examples has it."""

    def __init__(self, einsum_str, shape, *, rngs):
        self.einsum_str = einsum_str
        self.w = nnx.Param(0.1 * jax.random.normal(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x, self.w[...])


class Table(nnx.Module):
    def __init__(self, vocab, width, *, rngs):
        self.input_embedding = nnx.Param(jax.random.normal(rngs.params(), (vocab, width)))


class Gemma(nnx.Module):
    def __init__(self, rngs, einsum=OwnEinsum, vocab=64, width=32):
        self.embedder = Table(vocab, width, rngs=rngs)
        self.attn_vec_einsum = einsum("BTNH,NHD->BTD", (4, 8, width), rngs=rngs)
        self.q_einsum = einsum("BTD,NDH->BTNH", (4, width, 8), rngs=rngs)
        self.kv_einsum = einsum("BSD,CKDH->CBSKH", (2, 2, width, 8), rngs=rngs)
        self.gate_proj = nnx.Linear(width, 96, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(width, 96, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(96, width, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        table = self.embedder.input_embedding[...]
        x = table[tokens]
        q, (k, v) = self.q_einsum(x), self.kv_einsum(x)
        k, v = (jnp.repeat(one, 2, axis=2) for one in (k, v))
        x = x + self.attn_vec_einsum(jax.nn.dot_product_attention(q, k, v, is_causal=True))
        x = x + self.down_proj(jax.nn.gelu(self.gate_proj(x)) * self.up_proj(x))
        return x @ table.T


class Squares(nnx.Module):
    """Attention written by hand, of which all maps have one shape."""

    def __init__(self, rngs, width=32):
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, width // 2, rngs=rngs)
        self.value = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)


class Fused(nnx.Module):
    def __init__(self, rngs, width=32):
        self.embed = nnx.Embed(64, width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.proj = nnx.Linear(width, width, rngs=rngs)


class OwnNorm(nnx.Module):
    def __init__(self, width):
        self.scale = nnx.Param(jnp.ones(width))


class OwnConv(nnx.Module):
    def __init__(self, inputs, outputs):
        self.weight = nnx.Param(jnp.ones((3, 3, inputs, outputs)))


class OwnTables(nnx.Module):
    """Names that hold `pos` and `embed` as a word, and as part of one or of a map's."""

    def __init__(self, rngs, width=32):
        self.pos = nnx.Param(jnp.zeros((16, width)))
        self.token_embed = nnx.Param(jnp.zeros((64, width)))
        self.transposed = nnx.Param(jnp.zeros((width, 2 * width)))
        self.embed_proj = nnx.Param(jnp.zeros((2 * width, width)))


class GPT2Block(nnx.Module):
    def __init__(self, width, *, rngs):
        self.fc = nnx.Linear(width, 4 * width, rngs=rngs)
        self.proj = nnx.Linear(4 * width, width, rngs=rngs)
