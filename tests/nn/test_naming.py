"""Names of dims: found by what modules are, or given from outside."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from flax import nnx

from colossax import Plan
from colossax.errors import InputError, PlanError
from colossax.nn import LayerStack, describe, named, param, renamed
from colossax.sharding import use, validate
from tests.nn.plain import (
    MLP,
    Fused,
    Gemma,
    GPT2Block,
    OwnConv,
    OwnEinsum,
    OwnNorm,
    OwnTables,
    Squares,
    Table,
    Transformer,
    UNet,
    ViT,
)

EVERYWHERE = {"data": 2, "fsdp": 2, "tensor": 2}


def dims_of(make_model, mesh=EVERYWHERE, given=None):
    bound = Plan(mesh=mesh).bind(jax.devices())
    with use(bound):
        spec = named(describe(make_model), bound, given)
    validate(bound, spec.infos)
    return {info.path: info.dims for info in jax.tree.leaves(spec.infos)}


def stacked(make_layer, layers=3):
    def make_model(rngs):
        keys = jax.random.split(rngs.params(), layers)
        return nnx.Dict(s=nnx.vmap(lambda key: make_layer(nnx.Rngs(key)))(keys))

    return make_model


IN, OUT = ("embed", "mlp"), ("mlp", "embed")
HEADS_IN, HEADS_OUT = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")
FOUND = {
    "transformer": (
        Transformer,
        {
            "embed/embedding": ("vocab", "embed"),
            "positions": (None, "embed"),
            "blocks/1/norm1/scale": (None,),
            "blocks/1/attn/query/kernel": HEADS_IN,
            "blocks/1/attn/key/kernel": HEADS_IN,
            "blocks/1/attn/value/kernel": HEADS_IN,
            "blocks/1/attn/query/bias": ("heads", None),
            "blocks/1/attn/out/kernel": HEADS_OUT,
            "blocks/1/attn/out/bias": ("embed",),
            "blocks/1/up/kernel": IN,
            "blocks/1/up/bias": ("mlp",),
            "blocks/1/down/kernel": OUT,
            "head/kernel": ("embed", "vocab"),
        },
    ),
    "vit": (
        ViT,
        {
            "patch/kernel": (None, None, None, "mlp"),
            "pos_embedding": (None, None, "embed"),
            "blocks/layers/0/attn/out/kernel": HEADS_OUT,
            "blocks/layers/0/down/kernel": OUT,
            "head/kernel": IN,
        },
    ),
    "unet": (
        UNet,
        {
            "first/kernel": (None, None, None, "mlp"),
            "first/bias": ("mlp",),
            "down/conv1/kernel": (None, None, *IN),
            "down/conv1/bias": ("mlp",),
            "down/conv2/kernel": (None, None, *OUT),
            "up/kernel": (None, None, *IN),
            "last/kernel": (None, None, "embed", None),
        },
    ),
    "mlp": (MLP, {"first/kernel": IN, "second/kernel": OUT, "third/kernel": IN}),
    "gemma": (
        Gemma,
        {
            "embedder/input_embedding": ("vocab", "embed"),
            "q_einsum/w": ("heads", "embed", "head_dim"),
            "kv_einsum/w": (None, "heads", "embed", "head_dim"),
            "attn_vec_einsum/w": HEADS_OUT,
            "gate_proj/kernel": IN,
            "up_proj/kernel": IN,
            "down_proj/kernel": OUT,
        },
    ),
    "einsum": (
        lambda rngs: Gemma(rngs, nnx.Einsum),
        {"kv_einsum/kernel": (None, "heads", "embed", "head_dim")},
    ),
    "squares": (
        Squares,
        {"query/kernel": IN, "key/kernel": IN, "value/kernel": IN, "out/kernel": OUT},
    ),
    "fused": (
        Fused,
        {"embed/embedding": ("vocab", "embed"), "qkv/kernel": IN, "proj/kernel": OUT},
    ),
    "list": (
        lambda rngs: nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)]),
        {"0/kernel": IN, "1/kernel": OUT, "2/kernel": IN},
    ),
    "stacked by vmap": (
        stacked(lambda rngs: nnx.Linear(8, 32, rngs=rngs)),
        {"s/kernel": (None, *IN), "s/bias": (None, "mlp")},
    ),
    "stacked einsums": (
        stacked(lambda rngs: nnx.Einsum("BTD,NDH->BTNH", (4, 32, 8), rngs=rngs), 4),
        {"s/kernel": (None, "heads", "embed", "head_dim")},
    ),
    "stacked own einsums": (
        stacked(lambda rngs: nnx.Dict(q=OwnEinsum("BTD,NDH->BTNH", (4, 32, 8), rngs=rngs))),
        {"s/q/w": (None, "heads", "embed", "head_dim")},
    ),
    "stacked blocks with a norm by hand": (
        stacked(
            lambda rngs: nnx.Dict(
                norm1=OwnNorm(32),
                query=nnx.Linear(32, 32, rngs=rngs),
                out=nnx.Linear(32, 32, rngs=rngs),
                norm2=OwnNorm(32),
                up=nnx.Linear(32, 64, rngs=rngs),
                down=nnx.Linear(64, 32, rngs=rngs),
            )
        ),
        {
            "s/query/kernel": (None, *IN),
            "s/norm1/scale": (None, None),
            "s/out/kernel": (None, *OUT),
            "s/norm2/scale": (None, None),
            "s/up/kernel": (None, *IN),
            "s/down/kernel": (None, *OUT),
        },
    ),
    "stacked blocks all by hand": (
        stacked(
            lambda rngs: nnx.Dict(
                up=nnx.Param(jnp.ones((32, 64))),
                scale=nnx.Param(jnp.ones(64)),
                down=nnx.Param(jnp.ones((64, 32))),
            )
        ),
        {"s/up": (None, *IN), "s/scale": (None, None), "s/down": (None, *OUT)},
    ),
    "low rank": (
        lambda rngs: nnx.Dict(
            up=nnx.LoRALinear(32, 128, lora_rank=4, rngs=rngs),
            down=nnx.LoRALinear(128, 32, lora_rank=4, rngs=rngs),
        ),
        {
            "up/kernel": IN,
            "up/bias": ("mlp",),
            "up/lora/lora_a": ("embed", None),
            "up/lora/lora_b": (None, "mlp"),
            "down/kernel": OUT,
            "down/bias": ("embed",),
            "down/lora/lora_a": ("mlp", None),
            "down/lora/lora_b": (None, "embed"),
        },
    ),
    "low rank around maps": (
        lambda rngs: nnx.Dict(
            up=nnx.LoRA(32, 4, 128, base_module=nnx.Linear(32, 128, rngs=rngs), rngs=rngs),
            down=nnx.LoRA(128, 4, 32, base_module=nnx.Linear(128, 32, rngs=rngs), rngs=rngs),
        ),
        {
            "up/base_module/kernel": IN,
            "up/lora_b": (None, "mlp"),
            "down/base_module/kernel": OUT,
            "down/lora_a": ("mlp", None),
        },
    ),
    "stacked low rank": (
        stacked(
            lambda rngs: nnx.Dict(
                up=nnx.LoRALinear(32, 128, lora_rank=4, rngs=rngs),
                down=nnx.LoRALinear(128, 32, lora_rank=4, rngs=rngs),
            )
        ),
        {"s/down/kernel": (None, *OUT), "s/down/lora/lora_a": (None, "mlp", None)},
    ),
    "tables by whole words": (
        OwnTables,
        {
            "pos": (None, "embed"),
            "token_embed": ("vocab", "embed"),
            "transposed": IN,
            "embed_proj": OUT,
        },
    ),
    "a map of a table's sizes": (
        lambda rngs: nnx.Dict(
            wte=nnx.Embed(64, 32, rngs=rngs),
            wpe=nnx.Embed(128, 32, rngs=rngs),
            block=GPT2Block(32, rngs=rngs),
            head=nnx.Linear(32, 64, use_bias=False, rngs=rngs),
        ),
        {"block/fc/kernel": IN, "block/proj/kernel": OUT, "head/kernel": ("embed", "vocab")},
    ),
    "convolutions by hand": (
        lambda rngs: nnx.Dict(c=nnx.List([OwnConv(16, 32), OwnConv(32, 16)])),
        {"c/0/weight": (None, None, *IN), "c/1/weight": (None, None, *OUT)},
    ),
}


@pytest.mark.catches("names-turned")
@pytest.mark.catches("names-of-squares")
@pytest.mark.catches("equations-lost")
@pytest.mark.catches("stacked-vectors-matrices")
@pytest.mark.catches("low-rank-unnamed")
@pytest.mark.catches("stacked-order-lost")
@pytest.mark.catches("tables-within-words")
@pytest.mark.catches("maps-taken-for-heads")
@pytest.mark.parametrize("case", FOUND)
def test_names_are_found(case):
    make_model, expected = FOUND[case]
    found = dims_of(make_model)
    assert {path: found[path] for path in expected} == expected


def test_a_map_is_split_the_other_way_where_the_first_would_leave_it_whole():
    assert dims_of(MLP, {"fsdp": 4, "tensor": 2})["third/kernel"] == IN
    assert dims_of(lambda rngs: nnx.List([nnx.Linear(3, 8, rngs=rngs)]), {"fsdp": 8}) == {
        "0/kernel": OUT,
        "0/bias": ("embed",),
    }


@pytest.mark.catches("skipped-dims-unnamed")
def test_a_size_that_devices_do_not_divide_is_skipped_and_said():
    bound = Plan(mesh={"fsdp": 2, "tensor": 4}).bind(jax.devices())
    spec = named(describe(lambda rngs: Transformer(rngs, width=36, heads=6)), bound)
    assert spec.skipped["blocks/0/attn/query/kernel"] == "'heads' of 6"
    validate(bound, spec.infos)


def test_heads_that_ulysses_cannot_share_are_skipped():
    found = dims_of(Transformer, {"data": 1, "ulysses": 8})
    assert found["blocks/0/attn/query/kernel"] == ("embed", None, "head_dim")


class Own(nnx.Module):
    def __init__(self, rngs):
        self.told = param(jnp.ones((8, 8)), (None, "mlp"))
        self.nothing = param(jnp.ones((8, 8)), (None, None))
        self.plain = nnx.Linear(8, 32, rngs=rngs)


@pytest.mark.catches("told-names-lost")
def test_what_a_model_says_itself_stays():
    found = dims_of(Own)
    assert found["told"] == (None, "mlp") and found["nothing"] == (None, None)
    assert found["plain/kernel"] == IN


def test_the_first_pattern_that_matches_names():
    given = {r"told": ("embed", None), r"l.*/kernel$": ("embed", "heads"), r"kernel": OUT}
    with pytest.raises(InputError, match="all that 'kernel' matches, such as 'plain/kernel'"):
        dims_of(Own, given=given)
    del given["kernel"]
    found = dims_of(Own, given=given)
    assert found["told"] == ("embed", None) and found["plain/kernel"] == ("embed", "heads")
    assert found["plain/bias"] == ("mlp",)


def test_in_a_stack_names_are_of_one_layer():
    def stack(rngs):
        return nnx.Dict(s=LayerStack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 3, rngs=rngs))

    assert dims_of(stack)["s/kernel"] == ("layers", None, None)
    assert dims_of(stack, given={"^s/kernel": IN})["s/kernel"] == ("layers", *IN)


def test_names_are_those_of_the_whole_in_one_of_several_models():
    bound = Plan(mesh=EVERYWHERE).bind(jax.devices())
    both = named(describe({"actor": MLP, "critic": MLP}), bound, {"actor/first/k": OUT})
    alone = renamed(describe(MLP), both.infos["actor"])
    assert {i.path: i.dims for i in jax.tree.leaves(alone.infos)}["first/kernel"] == OUT


class Child(nnx.Module):
    def __init__(self, parent, rngs):
        self.parent, self.inner = parent, nnx.Linear(8, 32, rngs=rngs)


class Parent(nnx.Module):
    def __init__(self, rngs):
        self.child = Child(self, rngs)
        self.table = Table(16, 8, rngs=rngs)


def test_a_module_may_know_the_one_that_holds_it():
    with nnx.set_graph_mode(True):
        assert dims_of(Parent)["child/inner/kernel"] == IN


@pytest.mark.catches("circles-followed")
def test_in_tree_mode_it_may_not():
    with nnx.set_graph_mode(False), pytest.raises(InputError) as refused:
        describe(Parent)
    assert str(refused.value) == (
        "model: 'child/parent' refers to a module that holds it, which Flax's tree mode cannot"
        " have; set NNX_GRAPH_MODE=true, or leave the reference out"
    )


@pytest.fixture
def as_users_have_it():
    """Without the type checks that these tests put around the library's functions."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


WRONG = [
    ([("first/kernel", IN)], r"dims: a list is given; give a mapping, as {r'up/kernel\$': "),
    ({"first/bias": None}, r"'first/bias' is given None; give a tuple of a name"),
    ({"frist/kernel": IN}, r"path matches 'frist/kernel'; the nearest are 'first/kernel'"),
    ({r"first/kernel$": ("embed",)}, r"^first/kernel: .* names 1 dims .* for shape \(48, 32\)"),
    ({"first/bias": "mlp"}, r"'first/bias' is given 'mlp'; .* as \('mlp',\)"),
    ({"first/bias": (3,)}, r"is given \(3,\); give a tuple of a name"),
    ({"first/bias(": ("mlp",)}, "is no regular expression .*; give one that is searched"),
]


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.catches("unused-patterns")
@pytest.mark.parametrize("given, message", WRONG)
def test_names_that_do_not_fit_are_refused(given, message):
    with pytest.raises(InputError, match=message) as refused:
        dims_of(MLP, given=given)
    assert "\n" not in str(refused.value)


@pytest.mark.catches("misspelt-dims")
@pytest.mark.parametrize(
    "dim, meant", [("embd", "embed"), ("mpl", "mlp"), ("head", "heads"), ("vocub", "vocab")]
)
def test_a_misspelt_dim_is_refused(dim, meant):
    with pytest.raises(PlanError, match=f"first/bias: .* '{dim}'; did you mean '{meant}'"):
        dims_of(MLP, given={"first/bias": (dim,)})


@pytest.mark.parametrize("dim", ["width", "map", "patch", "embed2", "q_heads", "expert_embed"])
def test_a_dim_of_a_models_own_is_not(dim):
    assert dims_of(MLP, given={"first/bias": (dim,)})["first/bias"] == (dim,)


def test_a_rule_makes_a_dim_known():
    plan = Plan(mesh={"fsdp": 8})
    rules = plan.rules.updated(params={"embd": None})
    bound = plan.replace(rules=rules).bind(jax.devices())
    validate(bound, named(describe(MLP), bound, {"first/bias": ("embd",)}).infos)
