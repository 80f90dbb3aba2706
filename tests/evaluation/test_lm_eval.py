"""Every log-likelihood is that of lm-evaluation-harness on the exported weights."""

import csv
import email
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from colossax.cli import main
from colossax.evaluation import read_benchmark
from colossax.evaluation.measures.numbers import of_school

lm_eval = pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
extraction = pytest.importorskip("lm_eval.filters.extraction")
metrics = pytest.importorskip("lm_eval.api.metrics")
harness = pytest.importorskip("lm_eval.tasks")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PASSAGES = [
    "A first text, ä too.\n" * 60,
    "Another, which is short.",
    "def main():\n    pass\n" * 90,
]
SUBJECTS = ("law", "world_history")
ACCURACIES = {"acc": "accuracy", "acc_norm": "accuracy_norm", "acc_bytes": "accuracy_bytes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The main job's model after a few steps, exported, and what is said of it here and there."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
        few = "--steps=12 --validate-every=0 --devices=1 --data.validation_batches=1".split()
        (folder / "source").mkdir()
        for file in Path(email.__file__).parent.glob("*.py"):
            (folder / "source" / file.name).write_bytes(file.read_bytes())
        text = "--data=source"
        assert main(["train", "llama_stdlib", *few, text, "--out=mine", "--sample.prompt="]) == 0
        assert main(["export", "mine", "hf"]) == 0
        write_files(folder)
        for out, shots, *tasks in (
            ("ours", 2, "mmlu=mmlu", "gsm8k=gsm8k", "text=text.jsonl"),
            ("bundled", 0, "docstrings"),
        ):
            here = ["eval", "mine", f"--shots={shots}", f"--out={out}", "--devices=1"]
            assert main([*here, "--tasks", *tasks]) == 0
        yield folder


def write_files(folder):
    """Files as people have them, and the same rows as JSONL for the harness."""
    for subject in SUBJECTS:
        for split, count in (("dev", 3), ("test", 8)):
            rows = [question(subject, split, i) for i in range(count)]
            (folder / "mmlu" / split).mkdir(parents=True, exist_ok=True)
            with open(folder / f"mmlu/{split}/{subject}_{split}.csv", "w", newline="") as file:
                csv.writer(file).writerows(rows)
            told = [{"question": a, "choices": b, "answer": "ABCD".index(c)} for a, *b, c in rows]
            lines(folder / f"{subject}_{split}.jsonl", told)
    (folder / "gsm8k").mkdir()
    for split, count in (("train", 3), ("test", 3)):
        lines(folder / f"gsm8k/{split}.jsonl", [problem(split, i) for i in range(count)])
    lines(folder / "text.jsonl", [{"text": one} for one in PASSAGES])
    items = read_benchmark("docstrings").items
    # There the blank between is no part of a choice, and not counted in its length.
    rows = [
        {
            "prompt": one.prompt.text,
            "choices": [choice.removeprefix(" ") for choice in one.choices],
            "answer": one.answer,
        }
        for one in items
    ]
    lines(folder / "docstrings.jsonl", rows)


def lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def question(subject, split, i):
    return [f" What of {subject}, {split} {i}? ", f"{i}", 'a "word"', "x, y", "none", "ABCD"[i % 4]]


def problem(split, i):
    solved = f"It is <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}"
    return {"question": f"How much is {i} and {i}, {split}?", "answer": solved}


def examined(folder, *, redraws=10, **tasks):
    """The harness on the exported weights; errors of what is no mean it redraws so many times."""
    for name, task in tasks.items():
        (folder / "yaml").mkdir(exist_ok=True)
        (folder / f"yaml/{name}.yaml").write_text(yaml.safe_dump({"task": name, **task}))
    manager = harness.TaskManager(include_path=str(folder / "yaml"), include_defaults=False)
    # Its windows of text are of two tokens more than this, ours of one less than the sequence.
    sizes = f"pretrained={folder}/hf,dtype=float32,max_length={SEQUENCE - 2}"
    return lm_eval.simple_evaluate(
        model="hf",
        model_args=sizes,
        tasks=list(tasks),
        task_manager=manager,
        device="cpu",
        batch_size=16,
        bootstrap_iters=redraws,
        log_samples=True,
        verbosity="ERROR",
    )


SEQUENCE = 512


def dataset(folder, **splits):
    files = {name: str(folder / file) for name, file in splits.items()}
    return {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}


def shots(count):
    return {
        "fewshot_split": "train",
        "num_fewshot": count,
        "fewshot_config": {"sampler": "first_n"},
    }


def ours(folder, task, out="ours"):
    read = (folder / out / "items-0.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, read) if one["task"] == task]


def scores(folder, task, out="ours"):
    (told,) = json.loads((folder / out / "results.json").read_text())
    return told["tasks"][task]


def compared(folder, name, found, own, task=None):
    """Log-likelihoods and accuracies of questions with choices."""
    samples = sorted(found["samples"][name], key=lambda one: one["doc_id"])
    assert len(samples) == len(own)
    for sample, one in zip(samples, own, strict=True):
        theirs = [float(pair[0][0]) for pair in sample["resps"]]
        np.testing.assert_allclose(one["logprobs"], theirs, atol=1e-4, rtol=1e-6)
        for metric, ours_ in ACCURACIES.items():
            if metric in sample:
                assert sample[metric] == one[ours_], (metric, sample["doc_id"])
    return found["results"][name]


def test_bundled_questions(folder):
    choices = {
        **dataset(folder, test="docstrings.jsonl"),
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": one} for one in ACCURACIES],
    }
    found = examined(folder, questions=choices)
    result = compared(folder, "questions", found, ours(folder, "docstrings", "bundled"))
    own = scores(folder, "docstrings", "bundled")
    assert own["items"] == 500
    for theirs, name in ACCURACIES.items():
        np.testing.assert_allclose(own["scores"][name]["value"], result[f"{theirs},none"])
        np.testing.assert_allclose(own["scores"][name]["stderr"], result[f"{theirs}_stderr,none"])


ASKS = "{{question.strip()}}\n" + "".join(
    f"{letter}. {{{{choices[{i}]}}}}\n" for i, letter in enumerate("ABCD")
)


def test_mmlu(folder):
    tasks = {}
    for subject in SUBJECTS:
        about = subject.replace("_", " ")
        tasks[subject] = {
            **dataset(folder, test=f"{subject}_test.jsonl", train=f"{subject}_dev.jsonl"),
            **shots(2),
            "description": "The following are multiple choice questions (with answers) about"
            f" {about}.\n\n",
            "output_type": "multiple_choice",
            "doc_to_text": f"{ASKS}Answer:",
            "doc_to_choice": list("ABCD"),
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}],
        }
    found, own = examined(folder, **tasks), ours(folder, "mmlu")
    for subject in SUBJECTS:
        result = compared(folder, subject, found, [one for one in own if one["group"] == subject])
        value = scores(folder, "mmlu")["groups"][subject]["scores"]["accuracy"]
        np.testing.assert_allclose(value["value"], result["acc,none"])
        np.testing.assert_allclose(value["stderr"], result["acc_stderr,none"])


def test_gsm8k(folder):
    problems = {
        **dataset(folder, test="gsm8k/test.jsonl", train="gsm8k/train.jsonl"),
        **shots(2),
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Question:"], "max_gen_toks": 256, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    found, own = examined(folder, problems=problems), ours(folder, "gsm8k")
    samples = sorted(found["samples"]["problems"], key=lambda one: one["doc_id"])
    assert [one["said"] for one in own] == [one["resps"][0][0] for one in samples]
    assert len(own) == 3 and any(own[0]["said"])


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("so it is 1,234.\n#### 1,234", "1234"),
        ("#### 7 and then 8", "7"),
        ("costs $18.", "18"),
        ("18 apples", "18"),
        ("9 of 10", "9"),
        ("-3", "-3"),
        ("#### 3.0", "3"),
        ("none", "3"),
    ],
)
def test_numbers_of_answers(said, right):
    ignored = [",", r"\$", r"(?s).*#### ", r"\.$"]
    patterns = {
        "exact_match": {"regex_pattern": r"#### (\-?[0-9\.\,]+)"},
        "exact_match_last": {
            "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)",
            "group_select": -1,
        },
    }
    for name, pattern in patterns.items():
        ((found,),) = extraction.RegexFilter(**pattern).apply([[said]], [{}])
        sizes = {"regexes_to_ignore": ignored, "ignore_case": True}
        theirs = metrics.exact_match_fn(predictions=[found], references=[right], **sizes)[
            "exact_match"
        ]
        assert of_school(said, [right])[name] == theirs, name


def test_texts(folder):
    metrics = ["word_perplexity", "byte_perplexity", "bits_per_byte"]
    passages = {
        **dataset(folder, test="text.jsonl"),
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": one} for one in metrics],
    }
    found = examined(folder, redraws=0, passages=passages)
    own, result = scores(folder, "text:text.jsonl"), found["results"]["passages"]
    samples = sorted(found["samples"]["passages"], key=lambda one: one["doc_id"])
    for sample, one in zip(samples, ours(folder, "text:text.jsonl"), strict=True):
        theirs = sample["resps"][0][0]
        theirs = theirs[0] if isinstance(theirs, (list, tuple)) else theirs
        np.testing.assert_allclose(one["logprob"], float(theirs), rtol=1e-6, atol=1e-4)
    assert ours(folder, "text:text.jsonl")[0]["tokens"] > SEQUENCE, "of several windows"
    for metric in metrics:
        np.testing.assert_allclose(
            own["scores"][metric]["value"], result[f"{metric},none"], rtol=1e-5
        )
