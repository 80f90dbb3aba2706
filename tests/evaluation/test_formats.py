"""Files of benchmarks as people have them, and what is refused of them."""

import csv
import json

import pytest

from colossax.errors import DataError, InputError
from colossax.evaluation import read_benchmark


def lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def table(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows(rows)


def asked(item):
    return next(item.prompt.texts())


def mmlu_of(folder, inside=""):
    rows = [[" What? ", "one", 'a "b"', "c, d", "four", "B"], ["And?", "1", "2", "3", "4", "D"]]
    table(folder / inside / "test/world_history_test.csv", rows)
    table(folder / inside / "dev/world_history_dev.csv", [["Is it?", "y", "n", "m", "o", "A"]] * 3)
    return folder


@pytest.mark.catches("letters-without-their-blank")
@pytest.mark.parametrize("inside", ["", "data"])
def test_mmlu(tmp_path, inside):
    found = read_benchmark(f"mmlu={mmlu_of(tmp_path, inside)}", shots=1)
    head = "The following are multiple choice questions (with answers) about world history.\n\n"
    shot = "Is it?\nA. y\nB. n\nC. m\nD. o\nAnswer: A\n\n"
    first, second = found.items
    assert asked(first) == f'{head}{shot}What?\nA. one\nB. a "b"\nC. c, d\nD. four\nAnswer:'
    assert first.choices == (" A", " B", " C", " D")
    assert (first.answer, second.answer, first.group) == (1, 3, "world_history")
    assert second.where.endswith("world_history_test.csv, line 2")
    assert (found.name, found.metric) == ("mmlu", "accuracy")


def test_ceval(tmp_path):
    columns = ["id", "question", "A", "B", "C", "D", "answer"]
    table(tmp_path / "val/law_val.csv", [columns, ["0", "谁?", "甲", "乙", "丙", "丁", "C"]])
    shot = ["0", "何?", "a", "b", "c", "d", "B", "因为"]
    table(tmp_path / "dev/law_dev.csv", [[*columns, "explanation"], shot])
    (item,) = read_benchmark(f"ceval={tmp_path}", shots=1).items
    shown = "何?\nA. a\nB. b\nC. c\nD. d\n答案： B\n\n"  # noqa: RUF001
    text = "谁?\nA. 甲\nB. 乙\nC. 丙\nD. 丁\n答案："  # noqa: RUF001
    ask = "以下是中国关于{}的单项选择题，请选出其中的正确答案。\n\n"  # noqa: RUF001
    assert asked(item) == ask.format("law") + shown + text and item.answer == 2
    (tmp_path / "subject_mapping.json").write_text(json.dumps({"law": ["Law", "法学", "x"]}))
    (item,) = read_benchmark(f"ceval={tmp_path}", shots=0).items
    assert asked(item) == ask.format("法学") + text
    (tmp_path / "subject_mapping.json").write_text(json.dumps({"law": "法学"}))
    with pytest.raises(InputError, match="json: law: give a list of an English and a Chinese name"):
        read_benchmark(f"ceval={tmp_path}", shots=0)


@pytest.mark.catches("examples-that-are-asked")
def test_gsm8k(tmp_path):
    row = {"question": "How much?", "answer": "It is <<1+1=2>>2.\n#### 1,002"}
    lines(tmp_path / "test.jsonl", [row])
    lines(
        tmp_path / "train.jsonl", [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(6)]
    )
    (item,) = read_benchmark(f"gsm8k={tmp_path}").items
    shots = "".join(f"Question: {i}?\nAnswer: #### {i}\n\n" for i in range(5))
    assert asked(item) == f"{shots}Question: How much?\nAnswer:"
    assert item.answers == ("1002",) and item.ends == ("Question:", "</s>", "<|im_end|>")
    assert item.measure("#### 1002", item.answers)["exact_match"] == 1
    with pytest.raises(
        InputError, match="train.jsonl: the examples come from it, so they would be"
    ):
        read_benchmark(f"gsm8k={tmp_path / 'train.jsonl'}")
    (item,) = read_benchmark(f"gsm8k={tmp_path / 'test.jsonl'}", shots=0).items
    assert asked(item) == "Question: How much?\nAnswer:"


def test_math(tmp_path):
    for split, name, count in (
        ("train", "algebra", 2),
        ("train", "geometry", 2),
        ("test", "algebra", 1),
    ):
        for i in range(count):
            told = {"problem": f"{split} {name} {i}?", "solution": rf"so \boxed{{{i}}}"}
            lines(tmp_path / split / name / f"{i}.json", [told])
    (item,) = read_benchmark(f"math={tmp_path}", shots=3).items
    order = ["algebra 0", "geometry 0", "algebra 1"]
    shots = (f"Problem: train {one}?\nSolution: so \\boxed{{{one[-1]}}}" for one in order)
    assert asked(item) == "\n\n".join([*shots, "Problem: test algebra 0?\nSolution:"])
    assert (item.answers, item.group) == (("0",), "algebra")


@pytest.mark.catches("classes-of-none")
def test_longbench(tmp_path):
    rows = {"context": "a {input} text", "input": "which?", "answers": ["Food", "City"]}
    lines(tmp_path / "data/trec.jsonl", [{**rows, "all_classes": ["Food", "City", "Sun"]}])
    lines(tmp_path / "data/gov_report.jsonl", [{**rows, "all_classes": None}] * 3)
    lines(tmp_path / "data/hotpotqa_e.jsonl", [{**rows, "all_classes": None}])
    config = {"trec": "Read {context} and say {input}:", "hotpotqa": "{input} {context}"}
    config |= {"gov_report": "{context}", "lsht": "{context}"}
    lines(tmp_path / "config/dataset2prompt.json", [config])
    lines(
        tmp_path / "config/dataset2maxlen.json",
        [{"trec": 64, "hotpotqa": 32, "gov_report": 9, "lsht": 9}],
    )
    found = read_benchmark(f"longbench={tmp_path}")
    assert [one.group for one in found.items] == ["gov_report"] * 3 + ["trec"]
    assert found.groups_alike
    item = found.items[3]
    (other,) = read_benchmark(f"longbench_e={tmp_path}").items
    assert asked(item) == "Read a {input} text and say which?:"
    assert (item.max_tokens, item.group, item.prompt.cut) == (64, "trec", "middle")
    assert item.measure("\nCity or Sun\nFood", item.answers) == {"score": 0.5}, "the first line"
    assert asked(other) == "which? a {input} text"
    assert (other.group, other.max_tokens) == ("hotpotqa_e", 32)
    assert other.measure("the food!", other.answers) == {"score": 1.0}
    lines(tmp_path / "data/lsht.jsonl", [rows])
    with pytest.raises(
        InputError, match="lsht.jsonl, line 1: has the fields answers, context, inp"
    ):
        read_benchmark(f"longbench={tmp_path}")
    (tmp_path / "data/lsht.jsonl").unlink()
    lines(tmp_path / "data/unknown.jsonl", [rows])
    with pytest.raises(InputError, match="unknown.jsonl: is no set of LongBench; name it as there"):
        read_benchmark(f"longbench={tmp_path}")


GOOD = {"prompt": "a", "choices": [" b", " c"], "answer": 0}
ANSWERED = {"prompt": "a", "answers": ["b"]}


@pytest.mark.catches("examples-are-asked-too")
def test_our_own_files(tmp_path):
    rows = [GOOD, {**GOOD, "prompt": "q", "answer": 1, "group": "g"}]
    file = lines(tmp_path / "asked.jsonl", rows)
    found = read_benchmark(f"choices={file}")
    assert [one.group for one in found.items] == ["", "g"] and found.name == f"choices:{file}"
    (item,) = read_benchmark(f"choices={file}", shots=1).items
    assert asked(item) == "a b\n\nq" and item.where == f"{file}, line 2"
    file = lines(
        tmp_path / "answered.jsonl", [ANSWERED, {**ANSWERED, "until": ["."], "max_tokens": 3}]
    )
    first, second = read_benchmark(f"answers={file}").items
    assert (first.ends, first.max_tokens) == (("\n",), 64)
    assert (second.ends, second.max_tokens) == ((".",), 3)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a text")
    lines(tmp_path / "texts/b.jsonl", [{"text": "one"}, {"text": "two"}])
    shown, asks = [ANSWERED, {**ANSWERED, "prompt": "q: "}, ANSWERED], "a b\n\nq: b\n\na"
    file = lines(tmp_path / "shots.jsonl", shown)
    assert [asked(one) for one in read_benchmark(f"answers={file}", shots=2).items] == [asks]
    found = read_benchmark(f"text={tmp_path / 'texts'}", context=3)
    assert [one.text for one in found.items] == ["a text", "one", "two"]
    assert found.items[0].context == 3
    assert len(read_benchmark(f"text={tmp_path / 'texts'}", limit=2).items) == 2


@pytest.mark.catches("limit-of-all")
def test_a_limit_is_of_each_group(tmp_path):
    rows = [{**GOOD, "group": name, "prompt": str(i)} for i, name in enumerate("ababab")]
    found = read_benchmark(f"choices={lines(tmp_path / 'x.jsonl', rows)}", limit=2)
    assert [one.prompt.text for one in found.items] == ["0", "1", "2", "3"]


@pytest.mark.catches("answers-that-are-none")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2: it is a list, not an object; give a JSON object a line$"),
        ("{", "line 2: it is no JSON"),
        (json.dumps({**GOOD, "more": 1}), "line 2: has the fields answer, choices, more, prompt;"),
        (json.dumps({**GOOD, "answer": "0"}), "line 2: answer is a text, not an integer; repair"),
        (json.dumps({**GOOD, "answer": 2}), "line 2: answer: found 2; give 0 to 1, the number of"),
        (json.dumps({**GOOD, "choices": ["b"]}), "line 2: choices: give two texts or more, none"),
        (json.dumps({**GOOD, "choices": ["b", " "]}), "line 2: choices: give two texts or more"),
        ('{"prompt": "\\ud800", "choices": ["b", "c"], "answer": 0}', "line 2: "),
    ],
)
def test_lines_that_are_refused(tmp_path, line, message):
    file = tmp_path / "x.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(InputError, match=message):
        read_benchmark(f"choices={file}")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answers": []}, "line 1: answers: give one text or more, none of them empty"),
        ({"until": [""]}, "line 1: until: give texts, none of them empty"),
        ({"max_tokens": 0}, "line 1: max_tokens: found 0; give 1 or more"),
        (
            {"other": 0},
            "line 1: has the fields answers, other, prompt; give prompt and answers, and",
        ),
    ],
)
def test_lines_of_answers_that_are_refused(tmp_path, row, message):
    file = lines(tmp_path / "x.jsonl", [{**ANSWERED, **row}])
    with pytest.raises(InputError, match=message):
        read_benchmark(f"answers={file}")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [["q", "1", "2", "3", "4"]],
            "s_test.csv, line 1: has 5 columns; give 6: question, A, B, C",
        ),
        (
            [["q", "1", "2", "3", "4", "E"]],
            "s_test.csv, line 1: answer: found 'E'; give A, B, C or",
        ),
    ],
)
def test_rows_that_are_refused(tmp_path, rows, message):
    table(tmp_path / "test/s_test.csv", rows)
    with pytest.raises(InputError, match=message):
        read_benchmark(f"mmlu={tmp_path}", shots=0)


def test_what_is_no_such_file(tmp_path):
    with pytest.raises(InputError, match=r"none.jsonl: cannot be read \(No such file"):
        read_benchmark(f"choices={tmp_path / 'none.jsonl'}")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InputError, match="empty holds no questions; give one JSON object a line$"):
        read_benchmark(f"choices={tmp_path / 'empty'}")
    with pytest.raises(InputError, match=r"holds no \*_test.csv; name the folder of MMLU's test"):
        read_benchmark(f"mmlu={tmp_path}")
    with pytest.raises(DataError, match="does not exist"):
        read_benchmark(f"text={tmp_path / 'none'}")
    mmlu_of(tmp_path)
    with pytest.raises(
        InputError, match="dev.csv: has 3 examples, and 5 are asked for; give --shots 3"
    ):
        read_benchmark(f"mmlu={tmp_path}")
    lines(tmp_path / "test.jsonl", [{"question": "a", "answer": "5"}])
    with pytest.raises(
        InputError, match="line 1: answer: does not end in #### and a number; repair"
    ):
        read_benchmark(f"gsm8k={tmp_path}", shots=0)
    with pytest.raises(InputError, match=r"config.dataset2prompt.json: cannot be read"):
        lines(tmp_path / "data/trec.jsonl", [{}])
        read_benchmark(f"longbench={tmp_path}")
    table(tmp_path / "val/s_val.csv", [["question", "A"], ["q", "a"]])
    with pytest.raises(
        InputError, match="s_val.csv: has no column B; give question, A, B, C, D, ans"
    ):
        read_benchmark(f"ceval={tmp_path}", shots=0)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "hellaswag",
            "^--tasks: there is no 'hellaswag'; give one of docstrings, mmlu, ceval, gsm8k",
        ),
        ("docstrings=x", "^--tasks: docstrings comes with colossax; leave '=x' out$"),
        ("mmlu", "^--tasks: mmlu needs a path, its folder, with test and dev; give mmlu=PATH$"),
        ("mmlu=", "^--tasks: mmlu needs a path"),
    ],
)
def test_words_that_name_nothing(word, message):
    with pytest.raises(InputError, match=message):
        read_benchmark(word)


def test_examples_that_leave_no_question(tmp_path):
    file = lines(tmp_path / "x.jsonl", [GOOD])
    with pytest.raises(
        InputError, match="x.jsonl holds no questions; give more than the examples$"
    ):
        read_benchmark(f"choices={file}", shots=1)
