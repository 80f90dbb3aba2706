"""Plans for serving: formulas against arrays that are there, the search against all there is."""

import dataclasses
import itertools
import math

import jax
import pytest

from colossax.aot import parse_target
from colossax.config import MESH_AXES, Plan, Precision, Rules
from colossax.errors import InputError, PlanError
from colossax.inference.engine.program import EngineProgram
from colossax.inference.engine.sizing import cache_bytes
from colossax.inference.plan import param_shapes
from colossax.models import GPT2Config, LlamaConfig, MixtralConfig, T5Config, maker
from colossax.nn import Decoder
from colossax.planner.searching import Asked, asked_of
from colossax.planner.searching.seconds import MATMULS, MEMORY
from colossax.planner.serving import planned, search
from colossax.planner.serving.laid import OnServingMesh
from colossax.planner.serving.planned import plan_serving
from colossax.planner.serving.search import Wish, candidate, search_serving
from colossax.planner.serving.served import Served, profile_served, stages_refused
from colossax.planner.serving.verifying import CompiledServing, _described, sizes_of
from tests.cases import quick_first
from tests.inference import test_caches as caches

TARGET, FOUR = parse_target("h100:1x8"), parse_target("h100:1x4")
BF16 = Plan(precision=Precision(params="bfloat16", compute="bfloat16", cache="bfloat16"))
SMALL = LlamaConfig(vocab=64, embed=64, layers=4, heads=8, kv_heads=4, mlp=128, max_seq=256)
LLAMA_8B = LlamaConfig(
    vocab=128256, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336, max_seq=8192
)
MIXED = MixtralConfig(
    vocab=64, embed=64, layers=2, heads=8, kv_heads=4, mlp=96, experts=8, choices=2, max_seq=256
)


def profiled(config, **given):
    """What is known of a model."""
    make = maker(config) if hasattr(config, "decoder") else lambda rngs: Decoder(config, rngs=rngs)
    return profile_served(Served(make_model=make, **given), BF16)


def laid(profile, mesh, target=TARGET, **given):
    """It on a mesh."""
    return OnServingMesh(profile, BF16.replace(mesh=mesh, rules=Rules()), target, **given)


FAMILIES = {"llama": SMALL, "mixture": MIXED, "latent": caches.LATENT, "sinks": caches.SINKS}


@pytest.mark.catches("pages-of-a-ring-are-whole")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", {"ring": 2, "tensor": 4}),
        ("mixture", {"expert": 2, "fsdp": 2, "tensor": 2}),
        ("latent", {"tensor": 2, "fsdp": 4}),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in [
                ("llama", {"tensor": 8}),  # more than kv heads: those are whole
                ("llama", {"fsdp": 2, "tensor": 4}),
                ("llama", {"data": 4, "tensor": 2}),
                ("mixture", {"expert": 8}),
                ("sinks", {"data": 4, "tensor": 2}),
            ]
        ),
    ],
)
def test_weights_and_cache_are_those_of_an_engine(name, mesh):
    """Of the arrays that an engine would have on these devices, byte by byte."""
    profile = profiled(FAMILIES[name], context=48)
    one = candidate(laid(profile, mesh), 6)
    bound, spec = _described(profile, one.plan, jax.devices())
    params = param_shapes(bound, spec)
    program = EngineProgram(spec, bound, sizes_of(profile, one))
    held = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves(params)]
    assert one.bytes.weights == sum(held)
    assert one.bytes.cache == cache_bytes(program)


def leaves(tree):
    return jax.tree.leaves(tree)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_codes_of_the_cache_are_counted(form):
    profile = profiled(SMALL, context=48, cache=form)
    one = candidate(laid(profile, {"tensor": 4, "data": 2}), 6)
    program = EngineProgram(
        *reversed(_described(profile, one.plan, jax.devices())), sizes_of(profile, one)
    )
    assert one.bytes.cache == cache_bytes(program)


@pytest.mark.catches("the-cache-is-not-read")
@pytest.mark.catches("a-table-is-read-whole")
def test_a_step_reads_weights_and_cache_and_multiplies_them():
    """Of Llama 3 8B, by hand."""
    profile, gpu = profiled(LLAMA_8B, context=4096), TARGET.gpu
    attention = 4096 * 128 * (32 + 8 + 8 + 32)
    multiplied = 32 * (attention + 3 * 4096 * 14336) + 4096 * 128256
    norms = (2 * 32 + 1) * 4096
    one = laid(profile, {"data": 8}).seconds(20)
    cached = 20 * 4096 * 2 * 2 * 32 * 8 * 128
    rate = MEMORY * gpu.memory_bytes_per_s
    assert one.reading == pytest.approx((2 * (multiplied + norms) + cached) / rate)
    pairs = 20 * 4 * 4096 * 32 * 32 * 128
    peak = gpu.bf16_flops
    assert one.compute == pytest.approx(
        2 * 20 * multiplied / (MATMULS * peak) + pairs / (0.45 * peak)
    )
    assert one.waited == one.handed == one.idle == 0
    split = laid(profile, {"tensor": 8}).seconds(20)
    # Norms, which each device reads whole, are all that is not an eighth.
    assert split.reading - one.reading / 8 == pytest.approx(7 / 8 * 2 * norms / rate)
    assert split.compute == pytest.approx(one.compute / 8)


@pytest.mark.catches("a-table-that-is-the-head-is-read-twice")
def test_a_table_that_is_the_head_too_is_read_once():
    sizes = {"vocab": 64, "embed": 32, "layers": 2, "heads": 4, "mlp": 64, "max_seq": 64}
    profile = profiled(GPT2Config(**sizes), context=64)
    one = laid(profile, {"data": 8})
    held = one.bytes(3)
    positions = 2 * 64 * 32  # those are looked up
    rate = MEMORY * TARGET.gpu.memory_bytes_per_s
    assert one.seconds(3).reading == pytest.approx((held.weights - positions + held.cache) / rate)


def test_collectives_of_tensor_are_those_of_people():
    """A sum of hidden states behind each attention, MLP and the table; logits are gathered."""
    link, n, tokens = TARGET.gpu.nvlink, 8, 20
    one = laid(profiled(LLAMA_8B), {"tensor": 8}).seconds(tokens)
    summed = 65 * (6 * link.latency_s + 2 * 7 / n * tokens * 4096 * 2 / link.bytes_per_s)
    logits = 2 * (7 * link.latency_s + 7 / n * tokens * 128256 * 4 / link.bytes_per_s)
    agreed = 6 * 6 * link.latency_s  # on a token, by a few numbers
    assert one.waited == pytest.approx(summed + logits + agreed)


@pytest.mark.catches("all-experts-are-read")
def test_of_experts_those_are_read_that_tokens_choose():
    profile = profiled(MIXED, context=32)
    one = laid(profile, {"data": 8})
    rate = MEMORY * TARGET.gpu.memory_bytes_per_s
    expert = 2 * 3 * 64 * 96 * MIXED.layers
    cached = 32 * 2 * 2 * MIXED.layers * 4 * 8
    for seats, more in ((1, 2), (2, 2), (3, 2), (4, 0)):
        grown = rate * (one.seconds(seats + 1).reading - one.seconds(seats).reading)
        assert grown == pytest.approx(more * expert + cached)
    assert rate * one.seconds(1).compute < 8 * rate  # a second is not reached


def test_layers_with_a_window_read_that_alone():
    """All pages are kept, and of a long sequence a window is read."""
    full, window = (profiled(one, context=64) for one in (caches.CONFIG, caches.MISTRAL))
    assert laid(full, {"data": 8}).bytes(4).cache == laid(window, {"data": 8}).bytes(4).cache
    rows = {row.read for row in window.rows}
    assert rows == {caches.WINDOW}
    assert {row.read for row in full.rows} == {64}


@pytest.mark.catches("stages-are-taken-to-be-full")
def test_stages_hold_their_layers_and_take_turns():
    """Four stages of eight layers, each with the cache of all groups of seats."""
    profile = profiled(LLAMA_8B, context=4096)
    whole, staged = (laid(profile, mesh, FOUR) for mesh in ({"data": 4}, {"stage": 4}))
    layers, table = 2 * 32 * 218_112_000, 2 * 4096 * 128256
    cached = 4096 * 2 * 2 * 32 * 8 * 128
    assert staged.bytes(16).cache == 16 * cached / 4
    assert staged.bytes(16).weights == pytest.approx(layers / 4 + table, rel=1e-4)
    # A group's step reads what one device's step for a fourth of the seats reads.
    found, alone = staged.seconds(16), whole.seconds(4)
    assert found.reading == pytest.approx(alone.reading)
    # The last stage has the head too, and all wait for it.
    rate = MEMORY * TARGET.gpu.memory_bytes_per_s
    hop = TARGET.gpu.nvlink.latency_s + 4 * 4096 * 2 / TARGET.gpu.nvlink.bytes_per_s
    fullest = (layers / 4 + table + 4 * cached / 4) / rate + hop
    assert found.total == pytest.approx(4 * fullest, rel=1e-3)
    # One request is in one stage at a time, and waits for none.
    assert staged.seconds(1).idle == 0


def brute(profile, room, wish, most):
    """Tokens a second of every mesh and every number of seats."""
    found = {}
    sizes = [n for n in range(1, FOUR.size + 1) if FOUR.size % n == 0]
    for mesh in itertools.product(sizes, repeat=len(search.AXES)):
        if math.prod(mesh) != FOUR.size:
            continue
        named = {axis.value: n for axis, n in zip(search.AXES, mesh, strict=True) if n > 1}
        if "expert" in named and profile.config.mixture is None:
            continue
        if named.get("stage", 1) > profile.config.layers:
            continue
        if any(named.get(axis, 1) != size for axis, size in wish.asked.pinned.items()):
            continue
        try:
            one = laid(profile, named, FOUR)
        except PlanError:
            continue
        for seats in range(one.stages, most + 1):
            if wish.seats is not None and wish.seats != seats * one.replicas:
                continue
            if one.bytes(seats).total > search.MARGIN * room:
                continue
            seconds = one.seconds(seats).total
            if wish.latency_s is None or seconds <= wish.latency_s:
                rate = seats * one.replicas / seconds
                found[tuple(named.items())] = max(found.get(tuple(named.items()), 0), rate)
    return found


ODD = {"llama": SMALL, "mixture": MIXED, "odd": caches.CONFIG}
WISHES = {
    "any": (1e9, Wish()),
    "little room": (1.4e6, Wish()),
    "late": (1e9, Wish(latency_s=0.6e-3)),
    "soon": (1e9, Wish(latency_s=0.2e-3)),
    "eight": (1e9, Wish(seats=8)),
    "pinned": (1e9, Wish(seats=4, asked=asked_of(["tensor=2"], ["ring"]))),
}
QUICK = [("llama", "any"), ("odd", "little room"), ("mixture", "late"), ("llama", "pinned")]


@pytest.mark.catches("the-first-that-fits-is-taken")
@pytest.mark.catches("latency-is-forgotten")
@pytest.mark.parametrize(("name", "asked"), quick_first(itertools.product(ODD, WISHES), QUICK))
def test_nothing_gives_more_tokens_than_what_is_found(monkeypatch, name, asked):
    """Against every mesh with every number of seats."""
    config, (room, wish), most = ODD[name], WISHES[asked], 24
    monkeypatch.setattr(search, "MOST_SEATS", most)
    profile = profiled(config, context=32)
    found = search_serving(profile, BF16, FOUR, room=room, wish=wish).candidates
    rates = {tuple(one.plan.mesh.items()): one.tokens_per_second for one in found}
    expected = brute(profile, room, wish, most)
    assert rates == pytest.approx(expected)
    ordered = [one.tokens_per_second for one in found]
    assert ordered == sorted(ordered, reverse=True)
    for one in found:
        assert one.bytes.total <= room
        assert wish.seats in (None, one.all_seats)
        assert one.plan.mesh_sizes(FOUR.size).keys() == set(MESH_AXES)


def answered(config=SMALL, target=FOUR, given=None, plan=BF16, verify=False, **wish):
    served = Served(make_model=maker(config), **(given or {}))
    more = {name: wish.pop(name) for name in ("device_gb", "top", "tell") if name in wish}
    return plan_serving(served, plan, target, wish=Wish(**wish), verify=verify, **more)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target": parse_target("h100:2x8")}, "one node, and target 'h100:2x8' has 2; give one"),
        ({"given": {"context": 512}}, "--context: found 512, and the model's longest .* is 256"),
        (
            {"config": LLAMA_8B, "target": parse_target("h100:1x1"), "device_gb": 10.0},
            r"nothing fits 9.3 GiB of each of 1 NVIDIA H100.*needs least.*give h100:1x2 \(the few",
        ),
        (
            {"config": LLAMA_8B, "latency_s": 1e-3},
            r"gives a token within 1 ms; tensor=4 seats=1 is soonest.*, 2.38 ms; give --latency-ms",
        ),
        (
            {"seats": 3, "asked": asked_of(["data=4"], [])},
            "divides the model and shares 3 seats, with data=4; leave pins out",
        ),
        ({"asked": asked_of(["ulysses=2"], [])}, "--pin ulysses: engines are not split along it"),
        ({"asked": Asked(dims={"mlpp": ("tensor",)})}, "--pin mlpp: is neither a mesh axis nor"),
        ({"plan": BF16.placed({"parameters": 1.0})}, "host memory is not searched for serving"),
        (
            {
                "config": T5Config(
                    vocab=64, embed=32, layers=1, decoder_layers=1, heads=2, head_dim=16, mlp=64
                )
            },
            "reads a source, sound or images before its tokens",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(given, said):
    with pytest.raises((PlanError, InputError), match=said):
        answered(**given)


@pytest.mark.sweep
def test_what_is_named_when_nothing_is_soon_enough_does():
    with pytest.raises(PlanError) as refusal:
        answered(LLAMA_8B, latency_s=1e-3)
    enough = float(str(refusal.value).split("--latency-ms ")[1].split()[0])
    assert answered(LLAMA_8B, latency_s=enough / 1e3).plans


@pytest.mark.catches("what-is-over-its-budget-is-served")
def test_seats_follow_what_was_compiled(monkeypatch):
    """Programs that need more than formulas say have fewer seats, and are compiled again."""
    tried = []

    def compiled(profile, one, target):
        tried.append(one)
        total = int(1.5 * one.bytes.total)
        links = None
        return CompiledServing(weights=0, cache=0, total=total, links=links)

    monkeypatch.setattr(planned, "compiled_serving", compiled)
    monkeypatch.setattr(planned, "target_devices", lambda _: None)
    monkeypatch.setattr(search, "MOST_SEATS", 10_000)
    lines = []
    answer = answered(verify=True, device_gb=0.01, top=2, tell=lines.append)
    assert len(answer.plans) == 2
    for one in answer.plans:
        assert one.total_bytes <= 0.01e9
        assert one.to_json()["verified"]
        assert one.to_json()["collectives"] is None
    assert any("is over the budget" in line for line in lines)
    assert tried[1].plan == tried[0].plan
    assert tried[1].seats < tried[0].seats
    monkeypatch.setattr(
        planned,
        "compiled_serving",
        lambda *_: CompiledServing(weights=0, cache=0, total=10**9, links=None),
    )
    with pytest.raises(PlanError, match=r"were compiled or refused, and none fits .* over the bud"):
        answered(verify=True, device_gb=0.01)


def test_losers_say_why():
    first, *others = answered(LLAMA_8B, TARGET, top=5).plans
    assert first.why_not_first == ""
    for one in others:
        assert "fewer tokens/s" in one.why_not_first
    rates = [one.tokens_per_second for one in (first, *others)]
    assert rates == sorted(rates, reverse=True)


def test_stages_are_left_out_where_no_part_of_the_model_can_be_had(monkeypatch):
    assert stages_refused(profiled(SMALL), BF16, FOUR) is None
    monkeypatch.setattr(planned, "stages_refused", lambda *_: "it is whole")
    lines = []
    answer = answered(top=20, tell=lines.append)
    assert "without stages: it is whole" in lines
    assert not [one for one in answer.plans if "stage" in one.plan.mesh]
    assert dataclasses.asdict(answer.best.seconds)
