"""Plans of every tensor layout on eight devices, and the maps of a transformer layer."""

import dataclasses

import jax
import jax.numpy as jnp

from colossax.config import Plan, preset

B, S, D, F = 16, 8, 32, 64


def sequence_parallel(mesh, **fields):
    return preset("zero3+megatron_sp", mesh=mesh, tensor_matmul="overlap", **fields)


def tensor_parallel(mesh, **fields):
    return preset("zero3+megatron", mesh=mesh, tensor_matmul="overlap", **fields)


def flat(layout, matmul="auto", **mesh):
    return Plan(mesh=mesh, tensor_layout=layout, tensor_matmul=matmul)


PLANS = {
    "2d-2x4": flat("2d", row=2, col=4),
    "2d-4x2": flat("2d", row=4, col=2),
    "2d-1x8": flat("2d", row=1, col=8),
    "2d-8x1": flat("2d", row=8, col=1),
    "2d-data2": flat("2d", data=2, row=2, col=2),
    "2d-fsdp2": flat("2d", fsdp=2, row=2, col=2),
    "2d-ring2": flat("2d", ring=2, row=2, col=2),
    "2d-ulysses2": flat("2d", ulysses=2, row=1, col=4),
    "cannon-fsdp2": flat("2d", "cannon", fsdp=2, row=2, col=2),
    "cannon-ring2": flat("2d", "cannon", ring=2, row=2, col=2),
    "cannon-2x2x2": flat("2.5d", "cannon", depth=2, row=2, col=2),
    "2.5d-2x2x2": flat("2.5d", depth=2, row=2, col=2),
    "2.5d-4x1x2": flat("2.5d", depth=4, row=1, col=2),
    "2.5d-fsdp2": flat("2.5d", fsdp=2, depth=2, row=2, col=1),
    "3d-2x2x2": flat("3d", depth=2, row=2, col=2),
    "3d-1x2x4": flat("3d", depth=1, row=2, col=4),
    "3d-1x4x2": flat("3d", depth=1, row=4, col=2),
    "3d-fsdp2": flat("3d", fsdp=2, row=2, col=2),
    "3d-data2": flat("3d", data=2, depth=2, row=2),
    "3d-ring2": flat("3d", ring=2, row=2, col=2),
    "1d-sp2": sequence_parallel({"tensor": 2, "fsdp": 4}),
    "1d-sp4": sequence_parallel({"tensor": 4, "data": 2}),
    "1d-sp8": sequence_parallel({"tensor": 8}),
    "1d-sp-ring2": sequence_parallel({"tensor": 4, "ring": 2}),
    "1d-4": tensor_parallel({"tensor": 4, "fsdp": 2}),
    "1d-ring2": tensor_parallel({"tensor": 4, "ring": 2}),
}


@dataclasses.dataclass(frozen=True)
class Maps:
    """Maps of one input: dims and sizes of the input, and of each output."""

    inner: dict
    outs: tuple

    @property
    def contract(self):
        return len(self.inner)

    def dims(self, at):
        return (*self.inner, *self.outs[at])

    def arrays(self, *, bias=True):
        """x, weights, biases, and numbers to weigh the outputs with."""
        keys = iter(jax.random.split(jax.random.key(len(self.outs)), 32))
        inner = tuple(self.inner.values())
        scale = jnp.prod(jnp.asarray(inner)) ** -0.5

        def one(*shape):
            return jax.random.normal(next(keys), shape)

        outs = [tuple(out.values()) for out in self.outs]
        x = one(B, S, *inner)
        weights = tuple(one(*inner, *out) * scale for out in outs)
        biases = tuple(one(*out) if bias else None for out in outs)
        return x, weights, biases, tuple(one(B, S, *out) for out in outs)


HEADS = {"heads": 8, "head_dim": 4}
MAPS = {
    "qkv": Maps(
        {"embed": D}, (HEADS, {"kv_heads": 2, "head_dim": 4}, {"kv_heads": 2, "head_dim": 4})
    ),
    "mha": Maps({"embed": D}, (HEADS, {"kv_heads": 8, "head_dim": 4})),
    "o": Maps(HEADS, ({"embed": D},)),
    "gate-up": Maps({"embed": D}, ({"mlp": F}, {"mlp": F})),
    "down": Maps({"mlp": F}, ({"embed": D},)),
    "shared-kv": Maps({"embed": D}, ({"kv_heads": 1, "head_dim": 4},)),
    "value-head": Maps({"embed": D}, ({"rewards": 3},)),
}
