"""`mlp_share` auto: what layers compute and keep by hand, rates that decide, the same losses."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import pytest

import colossax
from colossax.config import BatchConfig, OffloadConfig, Plan, Precision, Segment
from colossax.errors import PlanError
from colossax.layerwise import recording_kept
from colossax.nn import Decoder, describe
from colossax.offload import GB, kept_token_share, save_rates
from colossax.optim import adamw, sgd
from colossax.planner.deciding import mlp_share
from tests.cases import quick_first
from tests.step.offloaded.streamed import CONFIG, batch, started, stepped
from tests.step.offloaded.test_cpu_update import RATES

AUTO = Segment(remat="full", offload="mlp+input", mlp_share="auto")
SLOW = dataclasses.replace(RATES, matmul_flops_per_s=2.5e12)
"""Of which the share of the small model's tokens is neither 0 nor 1."""

TOKENS, WIDTH = 8 * 16, 4
"""Of a batch; bytes of a float32."""
MATRICES = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
FLOPS = 2 * TOKENS * MATRICES + 2 * (2 * TOKENS * 16 * 32)
"""Of a layer: matmuls with parameters, and attention over all 16 tokens of a row, twice."""
INPUT, MLP = TOKENS * 32 * WIDTH, 2 * TOKENS * 48 * WIDTH


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))


def plan_of(segment=AUTO, **settings):
    return Plan(segments=(segment,), **settings)


def built(plan, *, devices=None, shapes=None):
    return started(plan, adamw(1e-2), devices=devices, shapes=batch() if shapes is None else shapes)


def share_of(plan, **settings):
    (segment,) = built(plan, **settings)[1].bound.plan.segments
    return segment.mlp_share


def formula(**settings):
    given = {
        "bytes_per_s": SLOW.to_host_bytes_per_s,
        "layer_s": FLOPS / SLOW.matmul_flops_per_s,
        "fixed_bytes": INPUT,
        "mlp_bytes": MLP,
    }
    return kept_token_share(**{**given, **settings})


def test_the_share_is_the_closed_form_and_trains_as_if_given_by_hand():
    save_rates(SLOW)
    expected = formula()
    assert 0.3 < expected < 0.7
    state, step = built(plan_of())
    assert step.bound.plan.segments == (dataclasses.replace(AUTO, mlp_share=expected),)
    assert step.note == (
        f"segments.mlp_share auto: {expected:.0%} of the tokens keep 'mlp' in host memory, as"
        " rates say"
    )
    by_hand = built(plan_of(dataclasses.replace(AUTO, mlp_share=expected)))
    assert by_hand[1].note is None
    found = stepped(state, step)[1]
    assert found == stepped(*by_hand)[1]
    assert len({metrics["loss"] for metrics in found}) == len(found)


def kept_bytes(step):
    """That layers keep in host memory, of each device."""
    with recording_kept() as kept:
        step.jitted.trace(step.abstract, step.abstract_batch(jax.eval_shape(batch)))
    return sum(kept.values())


def test_host_memory_holds_what_the_share_says():
    """Rounded to whole tokens of a row."""
    save_rates(SLOW)
    _, step = built(plan_of())
    kept = round(16 * formula()) / 16
    assert 0 < kept < 1
    assert kept_bytes(step) == 4 * (INPUT + kept * MLP)


@pytest.mark.parametrize(
    ("names", "pieces"),
    quick_first(itertools.product(["mlp", "mlp+input", "mlp+input+qkv"], [2, 1]), 5),
)
def test_bytes_of_a_layer_are_those_that_streaming_counts(devices, names, pieces):
    segment = Segment(remat="full", offload=names, mlp_share=1.0)
    settings = {"mesh": {"fsdp": 4, "tensor": 2}, "batch": BatchConfig(accumulation=pieces)}
    _, step = built(plan_of(segment, **settings), devices=devices)

    def build(plan):
        return built(plan)[1]

    (layer,), memory = mlp_share._layers(step, build)
    assert memory == float("inf")
    assert 4 * sum(layer.kept_bytes[name] for name in names.split("+")) == kept_bytes(step)
    assert layer.flops == FLOPS / 8 / pieces


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (plan_of(dataclasses.replace(AUTO, offload="mlp")), {"fixed_bytes": 0}),
        pytest.param(
            plan_of(dataclasses.replace(AUTO, offload="mlp+input+parameters")),
            {"bytes_per_s": SLOW.both_ways_bytes_per_s},
            marks=pytest.mark.sweep,
        ),
        (
            plan_of(offload=OffloadConfig(parameters=0.5)),
            {"bytes_per_s": SLOW.both_ways_bytes_per_s},
        ),
        (
            plan_of(Segment(remat="attention", offload="mlp+activations", mlp_share="auto")),
            {"fixed_bytes": 2 * INPUT},
        ),
        (
            plan_of(
                dataclasses.replace(AUTO, offload="mlp"), precision=Precision(compute="bfloat16")
            ),
            {"fixed_bytes": 0, "mlp_bytes": MLP / 2},
        ),
    ],
)
def test_what_else_travels_counts(plan, settings):
    save_rates(SLOW)
    assert share_of(plan) == formula(**settings)


def test_host_memory_that_is_given_is_a_bound():
    """Four layers, beside optimizer states in host memory."""
    save_rates(SLOW)
    states = 4 * 4 * MATRICES * 2
    budget = states + 4 * (INPUT + MLP / 4)
    offload = OffloadConfig(host_gb=budget / GB, optimizer=1.0, clipping="layer")
    assert share_of(plan_of(offload=offload)) == pytest.approx(0.25)
    lavish = dataclasses.replace(offload, host_gb=1.0)
    assert share_of(plan_of(offload=lavish)) == formula()


@pytest.mark.parametrize(("flops", "expected"), [(1e9, 1.0), (1e18, 0.0)])
def test_all_or_none_are_no_split(flops, expected):
    save_rates(dataclasses.replace(SLOW, matmul_flops_per_s=flops))
    _, step = built(plan_of())
    assert step.bound.plan.segments[0].mlp_share == expected
    assert kept_bytes(step) == 4 * (INPUT + expected * MLP)
    jaxpr = step.jitted.trace(step.abstract, step.abstract_batch(jax.eval_shape(batch))).jaxpr
    assert ("mlp_recomputed" in str(jaxpr)) == (not expected)


def test_each_segment_has_a_share_of_its_own():
    save_rates(SLOW)
    plan = Plan(
        segments=(dataclasses.replace(AUTO, count=1, offload="mlp"), AUTO, Segment(count=2))
    )
    _, step = built(plan)
    shares = [segment.mlp_share for segment in step.bound.plan.segments]
    assert shares == [formula(fixed_bytes=0), formula(), 1.0]
    assert f"auto: {shares[0]:.0%} and {shares[1]:.0%} of the tokens" in step.note


@pytest.mark.slow
def test_where_nothing_was_measured_all_is_recomputed():
    _, step = built(plan_of())
    assert step.bound.plan.segments[0].mlp_share == 0
    assert step.note == (
        "segments.mlp_share auto: 0%, nothing was measured for 'cpu'; colossax bench offload does"
        " it"
    )


def undecided(step):
    """What stands for the step before its plan is decided."""
    return SimpleNamespace(bound=plan_of().bind(jax.devices()[:1]), options=step.options)


def test_several_processes_decide_nothing_of_their_own(monkeypatch):
    save_rates(SLOW)
    step = built(plan_of())[1]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    shares, line = mlp_share._measured_shares(
        undecided(step), lambda plan: pytest.fail("nothing is traced")
    )
    assert set(shares.values()) == {0.0}
    assert line == "0%, several processes may have measured different rates"


def test_rows_that_devices_share_are_kept_whole(devices):
    save_rates(SLOW)
    mesh = {"ulysses": 2}
    _, step = built(plan_of(mesh=mesh), devices=devices[:2])
    assert step.bound.plan.segments[0].mlp_share == 0
    assert "all or none, several devices hold parts of a row; rates say" in step.note
    save_rates(dataclasses.replace(SLOW, matmul_flops_per_s=1e9))
    assert share_of(plan_of(mesh=mesh), devices=devices[:2]) == 1


def test_two_lines_are_one_note():
    save_rates(SLOW)
    offload = OffloadConfig(parameters=1.0, optimizer=1.0, cpu_update="auto")
    lines = built(plan_of(offload=offload))[1].note.split("\n")
    starts = ("plan.offload.cpu_update auto: ", "segments.mlp_share auto: ")
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 2


def test_a_cpu_update_given_by_hand_is_checked_beside_what_was_decided():
    with pytest.raises(PlanError, match="found 0.5, and no layer has parameters and optimizer"):
        built(plan_of(offload=OffloadConfig(cpu_update=0.5, pipelined="auto")))


def test_without_a_batch_it_is_refused():
    with pytest.raises(PlanError, match=r"depends on the tokens of a batch.*shapes=batch"):
        started(plan_of(), sgd(0.1))


def test_a_model_without_such_names_is_refused():
    step = built(plan_of())[1]
    plain = Plan(segments=(Segment(),))
    with pytest.raises(PlanError, match="no layer of the model names its hidden states 'mlp'"):
        mlp_share._layers(undecided(step), lambda plan: built(plain)[1])


def test_a_plan_in_force_that_is_not_decided_is_refused():
    bound = plan_of().bind(jax.devices()[:1])
    with colossax.use(bound):
        spec = describe(lambda rngs: Decoder(CONFIG.decoder(), rngs=rngs))
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, "float32"), spec.infos)
        tokens = jax.ShapeDtypeStruct((2, 16), "int32")
        with pytest.raises(PlanError, match="the share is not known yet; train with"):
            jax.eval_shape(lambda p, t: spec.merge(p)(t), params, tokens)
