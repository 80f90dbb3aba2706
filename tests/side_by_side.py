"""One encoder-decoder twice: of the library's operations, and of plain Flax modules with names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from colossax import nn
from colossax.pallas.attention import Mask
from colossax.sharding import attention, constrain, linears

WIDTH, HEADS, HIDDEN, VOCAB = 256, 8, 1024, 512


class OwnAttention(nnx.Module):
    def __init__(self, *, rngs):
        inner, dims = (WIDTH, HEADS, WIDTH // HEADS), ("embed", "heads", "head_dim")
        self.q, self.k, self.v = (nn.Linear(inner, dims, rngs=rngs, bias=True) for _ in range(3))
        out = (*inner[1:], WIDTH), (*dims[1:], "embed")
        self.o = nn.Linear(*out, rngs=rngs, contract=2, bias=True)

    def __call__(self, x, memory=None, *, causal=False):
        if memory is None:
            q, k, v = linears(x, (self.q.map, self.k.map, self.v.map))
        else:
            q, (k, v) = self.q(x), linears(memory, (self.k.map, self.v.map))
        inside = ("batch:inner", "seq", "heads", None)
        q, k, v = (constrain(one, *inside) for one in (q, k, v))
        return self.o(attention(q, k, v, mask=Mask(causal=causal)))


class OwnMLP(nnx.Module):
    def __init__(self, *, rngs):
        self.up = nn.Linear((WIDTH, HIDDEN), ("embed", "mlp"), rngs=rngs, bias=True)
        self.down = nn.Linear((HIDDEN, WIDTH), ("mlp", "embed"), rngs=rngs, bias=True)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


def named(init, *names):
    return nnx.with_partitioning(init, names)


normal, zeros = nnx.initializers.normal(0.02), nnx.initializers.zeros_init()


class PlainAttention(nnx.Module):
    def __init__(self, *, rngs):
        self.inner = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            decode=False,
            kernel_init=named(normal, "embed", "heads", "head_dim"),
            bias_init=named(zeros, "heads", "head_dim"),
            out_kernel_init=named(normal, "heads", "head_dim", "embed"),
            out_bias_init=named(zeros, "embed"),
            rngs=rngs,
        )

    def __call__(self, x, memory=None, *, causal=False):
        mask = nnx.make_causal_mask(x[..., 0]) if causal else None
        return self.inner(x, memory, mask=mask)


class PlainMLP(nnx.Module):
    def __init__(self, *, rngs):
        def make(size, to, *names):
            kernel, bias = named(normal, *names), named(zeros, names[1])
            return nnx.Linear(size, to, kernel_init=kernel, bias_init=bias, rngs=rngs)

        self.up = make(WIDTH, HIDDEN, "embed", "mlp")
        self.down = make(HIDDEN, WIDTH, "mlp", "embed")

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


def plain_norm(rngs):
    ones = nnx.initializers.ones_init()
    return nnx.LayerNorm(
        WIDTH, scale_init=named(ones, "embed"), bias_init=named(zeros, "embed"), rngs=rngs
    )


class Layer(nnx.Module):
    """Pre-norm; `cross` adds attention to a memory."""

    def __init__(self, own, cross, *, rngs):
        self.own, self.cross = own, cross
        make_attention, make_mlp = (OwnAttention, OwnMLP) if own else (PlainAttention, PlainMLP)
        norm = (lambda: nn.LayerNorm(WIDTH)) if own else (lambda: plain_norm(rngs))
        self.norms = nnx.List([norm() for _ in range(2 + cross)])
        self.attend = make_attention(rngs=rngs)
        self.mlp = make_mlp(rngs=rngs)
        if cross:
            self.attend_across = make_attention(rngs=rngs)

    def block(self, x):
        return constrain(x, "batch", "seq:block", "embed") if self.own else x

    def add(self, x, y):
        return constrain(x + y, "batch", "seq:residual", "embed") if self.own else x + y

    def __call__(self, x, memory=None):
        x = self.add(x, self.attend(self.block(self.norms[0](x)), causal=self.cross))
        if self.cross:
            x = self.add(x, self.attend_across(self.block(self.norms[2](x)), memory))
        return self.add(x, self.mlp(self.block(self.norms[1](x))))


class EncoderDecoder(nnx.Module):
    def __init__(self, rngs, *, own, layers, remat):
        self.own, self.remat = own, remat
        if own:
            self.embed = nn.Embedding(VOCAB, WIDTH, rngs=rngs, dim="vocab")
            self.head = nn.Linear((WIDTH, VOCAB), ("embed", "vocab"), rngs=rngs)
        else:
            table, head = named(normal, "vocab", "embed"), named(normal, "embed", "vocab")
            self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=table, rngs=rngs)
            self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, kernel_init=head, rngs=rngs)
        self.encoder = nnx.List([Layer(own, False, rngs=rngs) for _ in range(layers)])
        self.decoder = nnx.List([Layer(own, True, rngs=rngs) for _ in range(layers)])

    def __call__(self, source, target):
        run = (
            nnx.remat(lambda layer, *xs: layer(*xs))
            if self.remat
            else lambda layer, *xs: layer(*xs)
        )
        x = self.embed(source)
        for layer in self.encoder:
            x = run(layer, x)
        y = self.embed(target)
        for layer in self.decoder:
            y = run(layer, y, x)
        return self.head(y)


def maker(*, own, layers=2, remat=False):
    return functools.partial(EncoderDecoder, own=own, layers=layers, remat=remat)


def loss(model, batch):
    logits = model(batch["source"], batch["tokens"]).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    total = jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked)
    return {"nll": (total, jnp.float32(batch["targets"].size), 1.0)}, {}


DIMS = {"source": ("batch", "seq")}


def batch(rows, length=64, seed=0):
    drawn = np.random.default_rng(seed).integers(0, VOCAB, (3, rows, length), np.int32)
    return dict(zip(("source", "tokens", "targets"), drawn, strict=True))
