"""More by leave: settings that change what is computed, searched beside the plan's own."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from colossax.aot import Target
from colossax.config import Plan
from colossax.errors import InputError, PlanError
from colossax.planner.searching.asked import Asked
from colossax.planner.searching.pins import STATE
from colossax.planner.searching.planned import Answer, Planned, answer_of
from colossax.planner.searching.verifying import Subject, Tell


def plan_allowed(
    search: Callable[..., Answer],
    subject: Subject,
    plan: Plan,
    target: Target,
    *,
    asked: Asked,
    top: int,
    tell: Tell,
    **given: Any,
) -> Answer:
    """The fastest of what is found with and without each setting that is allowed.

    Args:
        search: `plan_run`.
        subject: What is planned.
        plan: See `plan_run`.
        target: Likewise.
        asked: Likewise.
        top: Likewise.
        tell: Likewise.
        **given: Likewise.

    Raises:
        PlanError: With none of them anything fits: the sentence is of that with all of them.
        InputError: A setting does not fit the optimizer, or that is not of the library's making.

    Cost: a search for each combination.
    """
    found: list[Planned] = []
    answers: list[Answer] = []
    refusal = PlanError("plan: nothing was searched")
    alone = dataclasses.replace(asked, allowed={})
    for changed, own, words in _combinations(subject, plan, asked):
        tell(f"by leave: {', '.join(words)}" if words else "without what is allowed")
        try:
            answers.append(search(changed, own, target, asked=alone, top=top, tell=tell, **given))
        except PlanError as problem:
            refusal = problem
            continue
        found += [dataclasses.replace(one, by_leave=words) for one in answers[-1].plans]
    if not found:
        raise refusal
    # Of equally fast ones that comes first which needs no leave.
    best = sorted(found, key=lambda one: (one.seconds.total, len(one.by_leave)))[:top]
    room = max(each.room for each in answers if best[0].plan in [p.plan for p in each.plans])
    return answer_of(
        [dataclasses.replace(one, why_not_first="") for one in best],
        sum(each.scored for each in answers),
        sum(each.compiled for each in answers),
        room,
        answers[0].rates,
    )


def _combinations(
    subject: Subject, plan: Plan, asked: Asked
) -> Iterator[tuple[Subject, Plan, tuple[str, ...]]]:
    """What is planned, its plan, and what leave it takes, as options; that without any first."""
    names = list(asked.allowed)
    for values in itertools.product(*((None, *asked.allowed[name]) for name in names)):
        chosen = {n: value for n, value in zip(names, values, strict=True) if value is not None}
        changed, own, words = subject, plan, list[str]()
        for name, value in chosen.items():
            if name == STATE:
                changed, same = _with_state(subject, value)
                words.append(f"--optimizer.state {value}")
            else:
                own_value = getattr(plan.precision, name)
                if name == "reduction" and own_value is None:  # as what is computed
                    own_value = plan.precision.compute
                same = own_value == value
                field: dict[str, Any] = {name: value}
                own = own.replace(precision=dataclasses.replace(own.precision, **field))
                words.append(f"--plan.precision.{name} {value}")
            if same:  # it is so without leave
                break
        else:
            yield changed, own, tuple(words)


def _with_state(subject: Subject, value: str) -> tuple[Subject, bool]:
    """The run with its moments kept so, and whether they are anyway.

    Raises:
        InputError: The optimizer is one's own, or has no such state.
    """
    if subject.config is None:
        raise InputError(
            "--allow state: it is of the optimizer of a recipe's configuration, and this task has"
            " one of its own making; make that with the state that you allow"
        )
    optimizer = subject.config.optimizer
    config = subject.config.replace(optimizer=dataclasses.replace(optimizer, state=value))
    return Subject.of(config, fresh=subject.fresh), optimizer.state == value
