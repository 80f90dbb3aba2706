"""Adapters of a run's models: what is saved of them, on what they go on, and of several models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.checkpoint import find_checkpoint
from colossax.config import Plan
from colossax.errors import InputError
from colossax.nn import AdapterConfig, Linear, param, with_adapter
from colossax.run.initial import initial_params
from colossax.run.origins import origins_of
from tests.oracle import assert_trees_close
from tests.run.test_several_models import step_of, trained
from tests.run.test_task import WIDTH, rows, toy

PAIR = AdapterConfig(rank=2, targets="into")
OTHER = Plan(mesh={"data": 2, "tensor": 2})


class OneMap(nnx.Module):
    """Regression on `WIDTH` numbers, by a map of the library."""

    def __init__(self, rngs):
        self.into = Linear((WIDTH, 8), ("embed", "mlp"), rngs=rngs, std=1.0)
        self.out = param(jax.random.normal(rngs.params(), (8,)), ("mlp",))

    def __call__(self, x):
        return jnp.tanh(self.into(x[None])[0]) @ self.out[...]


def policy_of(models, batch):
    own, beside = models.policy(batch["x"]), models.reference(batch["x"])
    count = jnp.float32(batch["y"].size)
    terms = {"squares": (own - batch["y"], 1.0), "distance": (own - beside, 0.1)}
    return {name: (jnp.sum(x**2), count, weight) for name, (x, weight) in terms.items()}, {}


def adapted(**changes):
    return toy(make_model=with_adapter(OneMap, PAIR), **changes)


def policy_and_reference():
    makers = {"policy": with_adapter(OneMap, PAIR), "reference": OneMap}
    return toy(name="two", make_model=makers, loss=policy_of, evaluators={})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("base") / "run"
    trained(toy(make_model=OneMap), out, steps=1)
    return str(out)


@pytest.mark.catches("base-saved-with-its-adapter")
def test_an_adapter_beside_a_reference_is_saved_alone_and_restored_on_another_mesh(tmp_path):
    """By a loop of one's own; the reference, which is no base, is saved whole."""
    step, there = step_of(policy_and_reference()), step_of(policy_and_reference(), OTHER)
    state = step(step(step.init(0), rows(0))[0], rows(1))[0]
    step.save(tmp_path, state)
    names = find_checkpoint(tmp_path).records()
    held = {name for name in names if "/params/" in name}
    assert held == {
        "policy/params/into/w/down",
        "policy/params/into/w/up",
        "reference/params/into/w",
        "reference/params/out",
    }
    with pytest.raises(InputError, match=r"leave out what is frozen; give its parameters as base="):
        there.restore(tmp_path)
    found = there.restore(tmp_path, base=there.init_from(there_of(state, there))["params"])
    one, other = (each(at, rows(2))[0] for each, at in ((step, state), (there, found)))
    assert_trees_close(other["params"], one["params"])


def there_of(state, step):
    """A state's parameters laid out by another step, what learned in it forgotten."""

    def placed(info, x, where):
        x = np.asarray(x)
        return jax.device_put(x if info.of_base else np.zeros_like(x), where)

    return jax.tree.map(placed, step.spec.infos, state["params"], step.shardings["params"])


@pytest.mark.catches("adapter-of-several-models")
def test_a_run_of_several_models_with_one_is_refused(base, tmp_path):
    init = {"policy": base, "reference": base}
    with pytest.raises(InputError, match=r"one of a model that is alone, and this one has policy,"):
        trained(policy_and_reference(), tmp_path / "run", steps=1, init=init)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_random_base_is_refused(tmp_path):
    with pytest.raises(InputError, match="beside a model that is frozen, and this one begins rand"):
        trained(adapted(), tmp_path / "run", steps=1)


@pytest.mark.catches("adapter-dropped-in-silence")
def test_an_adapter_is_never_dropped_in_silence(base, tmp_path):
    trained(adapted(), tmp_path / "run", steps=1, init=base)
    origins = origins_of(str(tmp_path / "run"), ())
    step = step_of(adapted())
    found = initial_params(origins, step)
    assert np.abs(np.asarray(found["into"]["w"]["up"])).max() > 0
    with pytest.raises(InputError, match="is an adapter with 'model/params/into/w/down', which"):
        initial_params(origins, step_of(toy(make_model=OneMap)))


@pytest.mark.catches("resumed-beside-another-base")
def test_it_goes_on_beside_its_own_base_alone(base, tmp_path):
    trained(adapted(), tmp_path / "run", steps=2, init=base)
    trained(toy(make_model=OneMap), tmp_path / "other", steps=2)
    other = str(tmp_path / "other")
    with pytest.raises(InputError, match=r"is an adapter of another base than '.*other/checkpoint"):
        trained(adapted(), tmp_path / "run", steps=4, init=other, resume=True)
    _, whole = trained(adapted(), tmp_path / "whole", steps=4, init=base)
    _, rest = trained(adapted(), tmp_path / "run", steps=4, init=base, resume=True, plan=OTHER)
    for step, loss in rest.items():
        assert loss == pytest.approx(whole[step], rel=1e-5)
    assert set(rest) == {3, 4}
