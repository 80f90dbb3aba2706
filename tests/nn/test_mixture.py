"""What a mixture's configuration refuses: one sentence with the culprit and a remedy."""

import dataclasses

import pytest

from colossax.errors import InputError
from colossax.nn import MixtureConfig
from colossax.recipes import recipe

MISTAKES = [
    ({"gate": "expert_choice"}, "'expert_choice' gives a token experts by the tokens behind it"),
    ({"gate": "base"}, "'base' gives a token experts by the tokens behind it"),
    ({"choices": 9}, "choices: 9 experts of a token, and there are 8; give at most 8"),
    ({"capacity_factor": 0.0}, "capacity_factor: found 0.0"),
    ({"gate": "topc"}, "gate: unknown 'topc'; did you mean 'topk'"),
    ({"groups": 3, "kept_groups": 1}, "3 groups do not divide 8 experts"),
    ({"groups": 4}, "kept_groups: found 0 of 4 groups; give 1 to 4"),
    ({"gate": "hierarchical"}, "'hierarchical' has groups; give them"),
    ({"choices": 1}, "the weight of a single choice is then 1"),
]


@pytest.mark.catches("looks-ahead-unrefused")
@pytest.mark.parametrize(("changes", "told"), MISTAKES)
def test_each_mistake_is_one_sentence(changes, told):
    with pytest.raises(InputError) as refused:
        MixtureConfig(**{"experts": 8, "choices": 2, "mlp": 16, **changes})
    assert told in str(refused.value) and ". " not in str(refused.value)


def test_gates_that_look_ahead_are_taken_where_asked_for():
    given = MixtureConfig(
        experts=8, choices=2, mlp=16, gate="expert_choice", look_ahead=True, balance="none"
    )
    assert given.look_ahead


def test_flops_count_the_experts_that_a_token_takes():
    one, two = (
        recipe("moe_tiny").replace(model=model).model.decoder().flops_per_token
        for model in (_with_experts(8), _with_experts(16))
    )
    assert two - one == 6 * 4 * 128 * 8  # columns of the routers alone


def _with_experts(count):
    return dataclasses.replace(recipe("moe_tiny").model, experts=count)
