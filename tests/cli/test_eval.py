"""`colossax eval`: benchmarks, one model or several, and what is refused."""

import json

import jax
import pytest

from colossax.cli import main
from tests.cli.test_draft import BASE
from tests.launching import write_text

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": "the d", "choices": [" of", "og ran", "oor"], "answer": 2},
    {"prompt": "ab ab ab", "choices": [" ab", " zzzz"], "answer": 0},
    {"prompt": "", "choices": ["a", "qqqq"], "answer": 0},
]
SAID = [{"prompt": "the d", "answers": ["og", "oor"], "max_tokens": 3}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models, and questions."""
    assert len(jax.devices()) == 8
    folder = tmp_path_factory.mktemp("eval")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        text = f"--data={write_text(folder / 'text')}"
        for name, seed in (("mine", 0), ("other", 1)):
            assert main(["train", *BASE, text, f"--out={name}", f"--seed={seed}"]) == 0
        for name, rows in (("asked", ROWS), ("said", SAID)):
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        yield folder


def asked(capsys, *words):
    capsys.readouterr()
    assert main(["eval", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.catches("eval-on-paper")
def test_a_share_is_told_for_people_and_for_programs(folder, capsys):
    rating = json.loads(asked(capsys, "mine", "asked.jsonl", "--json", "--devices=1"))
    assert set(rating) == {"questions", "accuracy", "accuracy_norm", "stderr", "stderr_norm"}
    assert rating["questions"] == 3 and rating["accuracy"] in (0, 1 / 3, 2 / 3, 1)
    line = asked(capsys, "mine", "asked.jsonl", "--devices=1")
    assert line.startswith(f"3 questions: accuracy {rating['accuracy']:.4f} ± ")


TASKS = ["--tasks", "choices=asked.jsonl", "answers=said.jsonl", "text=said.jsonl"]


@pytest.mark.catches("another-checkpoints-results")
def test_models_side_by_side(folder, capsys):
    (folder / "text.txt").write_text("the dog ran of the door " * 9)
    words = [*TASKS[:3], "text=text.txt", "--devices=1"]
    found = json.loads(asked(capsys, "mine", "other", *words, "--json", "--out=res"))
    each = found["checkpoints"]
    assert [one["checkpoint"] for one in each] == ["mine", "other"] and each[0]["step"] == 1
    alone = [json.loads(asked(capsys, name, *words, "--json")) for name in ("mine", "other")]
    for one, (own,) in zip(each, (one["checkpoints"] for one in alone), strict=True):
        assert one == own
    assert each[0]["tasks"]["text:text.txt"] != each[1]["tasks"]["text:text.txt"]
    assert json.loads((folder / "res/results.json").read_text()) == each
    items = [json.loads(line) for line in (folder / "res/items-1.jsonl").read_text().splitlines()]
    assert [one["where"] for one in items if one["task"] == "choices:asked.jsonl"] == [
        f"asked.jsonl, line {number}" for number in (1, 2, 3)
    ]
    assert (folder / "res/scores.png").read_bytes().startswith(b"\x89PNG")
    rows = asked(capsys, "mine", "other", *words).splitlines()
    assert rows[0].split() == ["task", "items", "metric", "mine", "other"]
    scores = [one["tasks"]["choices:asked.jsonl"]["scores"]["accuracy"] for one in each]
    shown = [f"{one['value']:.4f} ± {one['stderr']:.4f}" for one in scores]
    assert rows[1] == "choices:asked.jsonl  3      accuracy          " + "  ".join(shown)
    table = (folder / "res/results.md").read_text().splitlines()
    assert table[2] == f"| choices:asked.jsonl | 3 | accuracy | {shown[0]} | {shown[1]} |"


def test_any_mesh_tells_the_same(folder, capsys):
    meshes = (["--devices=1"], ["--devices=4", "--plan.mesh", "data=2,tensor=2"])
    one, other = (
        json.loads(asked(capsys, "mine", *TASKS[:2], "--json", *words)) for words in meshes
    )
    assert one["checkpoints"][0]["tasks"] == other["checkpoints"][0]["tasks"]


@pytest.mark.catches("left-out-untold")
def test_what_was_left_out_is_told(folder, capsys):
    capsys.readouterr()
    rows = [{"question": "w" * 90, "answer": f"#### {i}"} for i in range(2)]
    (folder / "long.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["eval", "mine", "--tasks", "gsm8k=long.jsonl", "--shots=0", "--devices=1"]) == 2
    assert (
        "its answer may have 256 tokens, and the model's sequences have" in capsys.readouterr().err
    )
    (folder / "test").mkdir()
    rows = [f"{'w' * long},1,2,3,4,A\n" for long in (9, 400, 500)]
    (folder / "test/law_test.csv").write_text("".join(rows))
    assert main(["eval", "mine", "--tasks", "mmlu=.", "--shots=0", "--devices=1"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[1].split()[:3] == ["mmlu", "3", "accuracy"]
    assert "mine, mmlu: text was left out of 2 of 3 prompts, which are longer" in told.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["bad.jsonl"],
            "bad.jsonl, line 2: has the fields prompt; give prompt, choices and answer",
        ),
        (["none.jsonl"], "none.jsonl: cannot be read (No such file"),
        (
            [],
            "FILE or --tasks: found neither; give a JSONL file of questions, or --tasks docstrings",
        ),
        (["asked.jsonl", "said.jsonl"], "FILE or --tasks: found several files; give a JSONL file"),
        (["mine", *TASKS[:2]], "CHECKPOINT: the same comes twice; give each once"),
        ([*TASKS[:2], TASKS[1]], "--tasks: choices:asked.jsonl comes twice; give it once"),
        (["--tasks", "arc"], "--tasks: there is no 'arc'; give one of docstrings, mmlu"),
        (
            [*TASKS[:2], "--out=asked.jsonl"],
            "--out asked.jsonl: is no folder that can be written (Fi",
        ),
    ],
)
@pytest.mark.catches("checkpoint-beside-itself")
@pytest.mark.catches("task-twice")
def test_refusals(folder, capsys, words, message):
    (folder / "bad.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"prompt": 1}\n')
    capsys.readouterr()
    assert main(["eval", "mine", *words, "--devices=1"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.catches("examined-before-it-learned")
@pytest.mark.parametrize("mesh", [["--devices=1"], ["--devices=4", "--plan.mesh=fsdp=2,tensor=2"]])
def test_a_run_is_examined_as_its_checkpoint_is(folder, capsys, mesh):
    text, out = f"--data={folder / 'text'}", f"--out=examined{len(mesh)}"
    words = [
        "--evaluation.tasks=choices=asked.jsonl, text=text.txt",
        "--steps=3",
        "--validate-every=1",
        *mesh,
    ]
    (folder / "text.txt").write_text("the dog ran of the door " * 9)
    assert main(["train", *BASE, text, out, *words, "--optimizer.peak_lr=0.1"]) == 0
    capsys.readouterr()
    lines = (folder / out[6:] / "metrics.jsonl").read_text().splitlines()
    *_, told = [one for one in map(json.loads, lines) if "validation_loss" in one]
    (one,) = json.loads(
        asked(capsys, out[6:], *TASKS[:2], "text=text.txt", "--json", "--devices=1")
    )["checkpoints"]
    for task, metric in (("choices:asked.jsonl", "accuracy"), ("text:text.txt", "bits_per_byte")):
        name = f"{task}_{metric}".replace(":", "_").replace(".", "_")
        value = one["tasks"][task]["scores"][metric]["value"]
        assert told[name] == pytest.approx(value, rel=1e-5)


@pytest.mark.catches("refused-with-a-folder")
def test_a_run_that_cannot_be_examined_has_no_folder(folder, capsys):
    words = [
        *BASE,
        f"--data={folder / 'text'}",
        "--out=none",
        "--evaluation.tasks=choices=no.jsonl",
    ]
    capsys.readouterr()
    assert main(["train", *words]) == 2
    assert "no.jsonl: cannot be read" in capsys.readouterr().err
    assert not (folder / "none").exists()
