"""Text as a task: what a planner asks of it needs no text, and what a run asks opens it once."""

import dataclasses

import pytest

from colossax.config import Plan
from colossax.errors import DataError
from colossax.recipes import recipe
from colossax.tasks import task_of, text_task
from colossax.tasks.config import train_config_from_json
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
