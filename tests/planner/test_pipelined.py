"""Pipelined transfers: a verdict decides the compiler's option, and losses decide the verdict."""

import dataclasses

import jax
import jaxlib
import pytest

from colossax.config import PIPELINED_OPTION, OffloadConfig, Plan
from colossax.offload import PipelinedTest, save_rates
from colossax.optim import sgd
from colossax.planner import loss_equality
from colossax.planner.deciding import pipelined
from colossax.planner.loss_equality import check_pipelined, compared
from colossax.sharding import compiler_options
from tests.step.offloaded.streamed import CONFIG, FULL, HOST, host, started, stepped
from tests.step.offloaded.test_cpu_update import RATES

PASSED = PipelinedTest(jaxlib=jaxlib.__version__, losses=40, largest_difference=2.5e-8, passed=True)
AUTO = Plan(offload=OffloadConfig(pipelined="auto"), compiler_options={"xla_a": 1})
START = "plan.offload.pipelined auto: "


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))


def keep(verdict, kind="NVIDIA H200"):
    save_rates(dataclasses.replace(RATES, device_kind=kind, pipelined=verdict))


def decided():
    """(options handed over, line) on an H200."""
    found, line = pipelined.with_pipelined(AUTO, "gpu", "NVIDIA H200")
    assert found.offload.pipelined == "off"
    return dict(found.compiler_options), line


def test_a_test_that_was_passed_turns_the_option_on():
    keep(PASSED)
    line = f"{START}on, as its losses were the same"
    assert decided() == ({"xla_a": 1, PIPELINED_OPTION: True}, line)


@pytest.mark.catches("pipelined-of-another-jaxlib")
@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (None, "it was not tested on 'NVIDIA H200'; colossax bench offload does it"),
        (
            dataclasses.replace(PASSED, largest_difference=0.02, passed=False),
            "it changed losses when it was tested, 40 losses differ by 0.02 of them at most",
        ),
        (
            dataclasses.replace(PASSED, largest_difference=None, passed=False),
            "it changed losses when it was tested, of 40 losses not all are finite",
        ),
        (
            dataclasses.replace(PASSED, jaxlib="0.1"),
            f"it was tested with jaxlib 0.1, this is {jaxlib.__version__}; colossax bench offload"
            " tests it again",
        ),
    ],
)
def test_without_one_it_stays_off_and_says_why(verdict, why):
    keep(verdict)
    assert decided() == ({"xla_a": 1}, f"{START}off, {why}")


def test_what_was_never_measured_was_not_tested():
    keep(PASSED, kind="NVIDIA H100")
    assert decided()[1].startswith(f"{START}off, it was not tested on 'NVIDIA H200'")


def test_several_processes_decide_nothing_of_their_own(monkeypatch):
    keep(PASSED)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert (
        decided()[1] == f"{START}off, several processes may have tested it with different results"
    )


def test_on_a_cpu_it_is_off_always():
    keep(PASSED, kind="cpu")
    _, step = started(host(pipelined="auto"), sgd(0.1))
    assert PIPELINED_OPTION not in compiler_options(step.bound)
    assert step.note == f"{START}off, it is for GPUs, and the device is 'cpu'"


def test_a_step_hands_the_option_to_the_compiler(monkeypatch):
    monkeypatch.setattr(pipelined, "_why_off", lambda *_: None)
    given = []
    monkeypatch.setattr(
        jax, "jit", spy(jax.jit, lambda options: given.append(options.get("compiler_options")))
    )
    _, step = started(host(pipelined="auto"), sgd(0.1))
    assert compiler_options(step.bound) == {PIPELINED_OPTION: True}
    assert {PIPELINED_OPTION: True} in given
    assert step.note == f"{START}on, as its losses were the same"


def spy(function, see):
    def called(*args, **options):
        see(options)
        return function(*args, **options)

    return called


def test_off_says_nothing_and_leaves_the_users_own_setting():
    keep(PASSED, kind="cpu")
    plan = host(FULL.replace(compiler_options={PIPELINED_OPTION: True}))
    _, step = started(plan, sgd(0.1))
    assert step.note is None
    assert compiler_options(step.bound) == {PIPELINED_OPTION: True}


# The test


@pytest.mark.parametrize(
    ("plain", "other", "worst", "passed"),
    [
        ([2.0, 1.0], [2.0, 1.0], 0.0, True),
        ([2.0, 1.0], [2.0, 1.0 + 5e-7], 5e-7, True),
        ([2.0, 1.0], [2.0, 1.0 + 2e-6], 2e-6, False),
        ([2.0, 1.0], [2.0 - 1e-5, 1.0], 5e-6, False),
        ([2.0, 1.0], [2.0, float("nan")], None, False),
        ([2.0, float("inf")], [2.0, float("inf")], None, False),
    ],
)
def test_losses_are_compared_relative_to_themselves(plain, other, worst, passed):
    found = compared(plain, other)
    assert (found.losses, found.passed, found.jaxlib) == (2, passed, jaxlib.__version__)
    assert found.largest_difference == (None if worst is None else pytest.approx(worst))


SMALL = dataclasses.replace(CONFIG, layers=2)


def test_the_same_program_passes_bit_for_bit():
    """On a CPU the option changes nothing; of steps that train."""
    found = check_pipelined(jax.devices()[0], model=SMALL, steps=3)
    assert found == PipelinedTest(
        jaxlib=jaxlib.__version__, losses=6, largest_difference=0.0, passed=True
    )
    own = loss_equality.losses(jax.devices()[0], OffloadConfig(**HOST), {}, model=SMALL, steps=3)
    assert len(set(own)) == 3


def test_a_program_that_computes_otherwise_fails(monkeypatch):
    """Where the option is on, the learning rate is a hundredth higher."""
    build = loss_equality.build_step

    def other(make_model, optimizer, loss, plan, **settings):
        if PIPELINED_OPTION in plan.compiler_options:
            optimizer = loss_equality.adamw(1.01e-3)
        return build(make_model, optimizer, loss, plan, **settings)

    monkeypatch.setattr(loss_equality, "build_step", other)
    found = check_pipelined(jax.devices()[0], model=SMALL, steps=3)
    assert not found.passed
    assert 1e-5 < found.largest_difference < 1e-2


def test_what_is_tested_has_layers_in_host_memory():
    kinds = {kind for kind in HOST for placed in loss_equality.PLACED if getattr(placed, kind)}
    assert kinds == set(HOST)
    assert loss_equality.STEPS >= 20
    for placed in loss_equality.PLACED:
        state, step = started(FULL.replace(offload=placed), sgd(0.1))
        assert step.streaming is not None
        stepped(state, step, steps=1)
