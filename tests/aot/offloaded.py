"""Training steps whose parameters and optimizer state lie in host memory, good and bad ones.

The model is a stack of two-matrix layers, kept as float32 `w`, `m` and `v` and computed in bf16.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from colossax.aot import Program, compile_program, parse_target, target_devices
from colossax.sharding import host_sharding

LAYERS, WIDTH, HIDDEN, TOKENS = 6, 1024, 2048, 2048
MATRICES = ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
PARAMETERS = LAYERS * 2 * WIDTH * HIDDEN
STACK_BYTES = 4 * LAYERS * WIDTH * HIDDEN
"""Of one of the six: `w`, `m` and `v` of two matrices."""
INPUTS_BYTES = 2 * LAYERS * TOKENS * WIDTH
"""Of what the layers get, in bf16."""

AXIS = "fsdp"


def mesh_of(target: str) -> Mesh:
    devices = np.array(target_devices(parse_target(target)))
    return Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))


def to_device(tree):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)


def to_host(tree):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Host), tree)


def fetch(stacks, index):
    """One layer, on the device."""
    return to_device(
        jax.tree.map(lambda s: jax.lax.dynamic_index_in_dim(s, index, 0, keepdims=False), stacks)
    )


def store(stacks, layer, index):
    """The stacks with one layer replaced."""
    return jax.tree.map(
        lambda s, leaf: jax.lax.dynamic_update_index_in_dim(s, leaf, index, 0),
        stacks,
        to_host(layer),
    )


def empty_stack(mesh, shape):
    """A bf16 stack in host memory, split along its dim 1, that nothing fills."""
    local = (shape[0], shape[1] // mesh.size, *shape[2:])
    made = jax.shard_map(
        lambda: jax.lax.empty(local, jnp.bfloat16),
        mesh=mesh,
        in_specs=(),
        out_specs=PartitionSpec(None, AXIS),
        check_vma=False,
    )
    return to_host(made())


def layer(w, x):
    up, down = (leaf.astype(jnp.bfloat16) for leaf in w)
    return x + jax.nn.gelu(x @ up) @ down


def updated(state, gradients):
    def leaf(w, m, v, g):
        g = g.astype(jnp.float32)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

    return tuple(zip(*(leaf(*each) for each in zip(*state, gradients, strict=True)), strict=True))


def head(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def forward(mesh, w, x):
    """Result of all layers, and a host stack of what each got."""

    def body(i, carry):
        x, inputs = carry
        return layer(fetch(w, i), x), store(inputs, x, i)

    inputs = empty_stack(mesh, (LAYERS, TOKENS, WIDTH))
    return jax.lax.fori_loop(0, LAYERS, body, (x, inputs))


def backward(stacks, w, inputs, dy, change):
    """Stacks changed layer by layer by `change(stacks, gradients, index)`, last layer first."""

    def body(step, carry):
        stacks, dy = carry
        i = LAYERS - 1 - step
        _, pullback = jax.vjp(layer, fetch(w(stacks), i), fetch(inputs, i))
        gradients, dy = pullback(dy)
        return change(stacks, gradients, i), dy

    return jax.lax.fori_loop(0, LAYERS, body, (stacks, dy))


def update(state, gradients, i):
    return store(state, updated(fetch(state, i), gradients), i)


def fused(mesh):
    """Backward pass and update in one loop; what `colossax.aot` should find nothing wrong with."""

    def step(state, x):
        y, inputs = forward(mesh, state[0], x)
        loss, dy = jax.value_and_grad(head)(y)
        state, _ = backward(state, lambda state: state[0], inputs, dy, update)
        return state, loss

    return step


def overwriting(mesh):
    """The same, with the new state as what differentiation gives for the old."""

    @jax.custom_vjp
    def layers(state, x):
        return forward(mesh, state[0], x)[0]

    def keep(state, x):
        y, inputs = forward(mesh, state[0], x)
        return y, (state, inputs)

    def change(kept, dy):
        state, inputs = kept
        return backward(state, lambda state: state[0], inputs, dy, update)

    layers.defvjp(keep, change)

    def step(state, x):
        loss, state = jax.value_and_grad(lambda state: head(layers(state, x)))(state)
        return state, loss

    return step


MICROBATCHES = 3


def accumulated(mesh):
    """Gradients of three microbatches added up in a bf16 stack on the host, then one update."""

    def piece(w, gradients, x, combine):
        y, inputs = forward(mesh, w, x)
        dy = jax.grad(head)(y)

        def change(stacks, new, i):
            new = tuple(leaf.astype(jnp.bfloat16) for leaf in new)
            return store(stacks, combine(stacks, new, i), i)

        return backward(gradients, lambda _: w, inputs, dy, change)[0]

    def add(stacks, new, i):
        return jax.tree.map(jnp.add, fetch(stacks, i), new)

    def step(state, x):
        empty = tuple(empty_stack(mesh, (LAYERS, *sizes)) for sizes in MATRICES)
        gradients = piece(state[0], empty, x, lambda _stacks, new, _i: new)
        gradients = jax.lax.fori_loop(
            1, MICROBATCHES, lambda _, gradients: piece(state[0], gradients, x, add), gradients
        )
        state = jax.lax.fori_loop(
            0, LAYERS, lambda i, state: update(state, fetch(gradients, i), i), state
        )
        return state, jnp.zeros(())

    return step


def made(make):
    """A step that fills a bf16 host stack made by `make()` by adding to each layer of it."""

    def step(state, x):
        def body(i, stack):
            return store(stack, fetch(stack, i) + x, i)

        stack = jax.lax.fori_loop(0, LAYERS, body, make())
        return state, fetch(stack, 1).astype(jnp.float32).sum()

    return lambda _mesh: step


def whole(_):
    """All state to the device, updated, and back."""

    def step(state, gradients):
        return to_host(updated(to_device(state), gradients)), jnp.zeros(())

    return step


def scanned(_):
    """Host stacks as what a scan reads and what it makes."""

    def step(state, gradients):
        def body(_, each):
            state, gradients = each
            return None, to_host(updated(to_device(state), gradients))

        return jax.lax.scan(body, None, (state, gradients))[1], jnp.zeros(())

    return step


def double_buffered(_):
    """The next layer is read before this one is written."""

    def step(state, gradients):
        def body(i, carry):
            state, here = carry
            following = fetch(state, jnp.minimum(i + 1, LAYERS - 1))
            return store(state, updated(here, fetch(gradients, i)), i), following

        state, _ = jax.lax.fori_loop(0, LAYERS, body, (state, fetch(state, 0)))
        return state, jnp.zeros(())

    return step


def streamed(_):
    """A loop that carries the stacks and updates them in place."""

    def step(state, gradients):
        def body(i, state):
            return store(state, updated(fetch(state, i), fetch(gradients, i)), i)

        return jax.lax.fori_loop(0, LAYERS, body, state), jnp.zeros(())

    return step


def decayed_on_host(_):
    """Arithmetic on what was never moved to the device."""

    def step(state, gradients):
        w, m, v = state
        scale = to_host(gradients[0][0, 0, 0].astype(jnp.float32))
        return (w, jax.tree.map(lambda leaf: leaf * scale, m), v), jnp.zeros(())

    return step


def arguments(mesh, *, gradients: bool):
    """Abstract state on the host, and gradients or tokens on the device."""
    on_host = host_sharding(mesh, PartitionSpec(None, AXIS))
    state = tuple(
        tuple(
            jax.ShapeDtypeStruct((LAYERS, *sizes), np.float32, sharding=on_host)
            for sizes in MATRICES
        )
        for _ in range(3)
    )
    if gradients:
        split = NamedSharding(mesh, PartitionSpec(None, AXIS))
        other = tuple(
            jax.ShapeDtypeStruct((LAYERS, *sizes), jnp.bfloat16, sharding=split)
            for sizes in MATRICES
        )
    else:
        split = NamedSharding(mesh, PartitionSpec(AXIS))
        other = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16, sharding=split)
    return state, other


def compiled(make, target: str = "h200:1x1", *, gradients: bool = False) -> tuple[Program, object]:
    """A step's program for a target that is not there, and its jaxpr.

    Args:
        make: Gives the step for a mesh.
        target: Name of the target.
        gradients: Whether the step gets stacks of gradients in place of tokens.
    """
    mesh = mesh_of(target)
    state, other = arguments(mesh, gradients=gradients)
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    loss = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(make(mesh), donate_argnums=0, out_shardings=(placed, loss))
    traced = jitted.trace(state, other)
    return compile_program(traced.lower()), traced.jaxpr
