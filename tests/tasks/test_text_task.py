"""Text as a task: what a planner asks of it needs no text, and what a run asks opens it once."""

import dataclasses

import pytest

from colossax.config import Plan
from colossax.errors import DataError, InputError
from colossax.recipes import recipe
from colossax.step.step import Step
from colossax.tasks import task_of, text_task
from colossax.tasks.config import train_config_from_json, train_config_to_json
from tests.launching import write_text

CONFIG = recipe("llama_tiny")


def of_text(path):
    return CONFIG.replace(data=dataclasses.replace(CONFIG.data, path=str(path)))


def test_text_that_is_not_there_is_missed_once_it_is_wanted(tmp_path):
    config = of_text(tmp_path / "nowhere")
    task = task_of(config)
    assert task.name == "llama_tiny" and task.tokens == 24 * 96
    assert task.flops == CONFIG.model.decoder().train_flops_per_token(96) * task.tokens
    assert {x.shape for x in task.shapes.values()} == {(24, 96)}
    with pytest.raises(DataError, match="nowhere"):
        task.identity()


@pytest.mark.catches("text-opened-again")
def test_it_is_opened_once(tmp_path, monkeypatch):
    opened = []
    plain = text_task.open_text
    monkeypatch.setattr(text_task, "open_text", lambda *a, **k: opened.append(a) or plain(*a, **k))
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    task = task_of(of_text(write_text(tmp_path / "text", documents=4)))
    assert opened == []
    assert set(task.documents()) == {"model", "tokenizer"}
    assert set(task.baselines()) == {"unigram_entropy"}
    assert task.introduction()[0].startswith("text: ") and len(opened) == 1
    assert task.identity()["data"][0] == str(tmp_path / "text") and len(opened) == 1


def test_what_was_asked_is_written_with_the_plan_that_runs():
    plan = Plan(mesh={"fsdp": 2})
    written = train_config_from_json(task_of(CONFIG).asked(plan))
    assert written == CONFIG.replace(plan=plan)


def mixed(folder, **changes):
    for name in ("many", "few"):
        write_text(folder / name, documents=6)
    paths = {str(folder / "many"): 3.0, str(folder / "few"): 1.0}
    return CONFIG.replace(data=dataclasses.replace(CONFIG.data, mixture=paths, **changes))


@pytest.mark.catches("mixture-loss-unweighted")
def test_a_mixture_is_read_learnt_and_validated_by_its_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    task = task_of(mixed(tmp_path))
    lines = task.introduction()
    assert lines[0].startswith("text: 25.0% few: ") and lines[1].startswith("text: 75.0% many: ")
    assert task.identity()["data"][0] == f"{tmp_path}/few, {tmp_path}/many"
    assert task.identity()["data.mixture"] == "0.25 0.75"
    losses = iter([6.0, 2.0])
    monkeypatch.setattr(text_task, "mean_loss", lambda *_: next(losses))
    monkeypatch.setattr(text_task.Text, "held_out", lambda *_: None)
    found = task.evaluators["validation_loss"](object.__new__(Step), {})
    assert found == {
        "validation_loss": 3.0,
        "validation_loss many": 2.0,
        "validation_loss few": 6.0,
    }


@pytest.mark.catches("mixture-of-no-weights")
def test_a_mixture_without_weights_is_refused():
    written = train_config_to_json(CONFIG)
    written["data"]["mixture"] = "web"
    with pytest.raises(InputError, match="data.mixture: expected an object, found 'web'"):
        train_config_from_json(written)


@pytest.mark.catches("mixture-by-its-order")
def test_the_order_of_a_mixture_is_no_matter():
    one, other = (
        dataclasses.replace(CONFIG.data, mixture=mixture)
        for mixture in ({"web": 0.7, "code": 0.3}, {"code": 0.3, "web": 0.7})
    )
    assert list(one.sources.items()) == list(other.sources.items())


def test_a_mixture_goes_through_json_and_back():
    config = CONFIG.replace(data=dataclasses.replace(CONFIG.data, mixture={"a": 0.5, "b": 2}))
    assert train_config_from_json(task_of(config).asked(config.plan)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": {"a": 0.0}}, "data.mixture of 'a': found 0.0; give a number above 0"),
        ({"mixture": {"a": 1.0}, "path": "b"}, "data.path is 'b' as well; name it in the mixture"),
        ({"packing": "hole"}, "data.packing: unknown 'hole'; did you mean 'whole'"),
    ],
)
def test_what_cannot_be_mixed_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG.data, **changes)
