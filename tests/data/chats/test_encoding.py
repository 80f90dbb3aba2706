"""Conversations as tokens: what is told, how it is kept, which row is wrong."""

import json

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from colossax.data import path_documents
from colossax.data.chats.encoding import chat_template, encode_answers
from colossax.data.chats.forms import Wanted
from colossax.data.chats.template import PLAIN
from colossax.errors import DataError, InputError
from tests.serve.fake import CHATML, TOKENIZER

START, END = TOKENIZER.specials["<|im_start|>"], TOKENIZER.specials["<|im_end|>"]
TWO = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "<|im_end|> 3?"},
    {"role": "assistant", "content": "3."},
]


def template(source=CHATML):
    return chat_template(source, TOKENIZER, bos="", instead="give another")


def told(source, messages, first=0):
    tokens, which = template(source).told(messages, first)
    return tokens, [token for token, said in zip(tokens, which, strict=True) if said]


def chatml(role, text):
    return [START, *TOKENIZER.encode(f"{role}\n{text}"), END, *TOKENIZER.encode("\n")]


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def encoded(path, wanted=Wanted.CONVERSATION, source=CHATML):
    return encode_answers(path_documents(path), TOKENIZER, template(source), wanted, source)


@pytest.mark.catches("prompts-are-told")
@pytest.mark.catches("ends-are-not-told")
def test_the_assistants_tokens_are_told_and_what_ends_them():
    tokens, said = told(CHATML, TWO)
    whole = [token for one in TWO for token in chatml(one["role"], one["content"])]
    assert tokens == whole[:-1]  # what a template writes behind the last end is nobody's
    assert said == [*TOKENIZER.encode("4"), END, *TOKENIZER.encode("3."), END]


def test_answers_before_are_read_not_told():
    tokens, said = told(CHATML, TWO, 4)
    assert tokens == told(CHATML, TWO)[0]
    assert said == [*TOKENIZER.encode("3."), END]


def test_what_is_asked_is_encoded_as_a_server_does():
    tokens, _ = told(CHATML, TWO)
    asked = template().tokens(TWO[:4])
    assert tokens[: len(asked)] == asked


def test_the_plain_template_ends_an_answer_as_a_document():
    tokens, said = told(PLAIN, TWO[1:3])
    assert TOKENIZER.decode(tokens) == "<|user|>\n2 + 2?\n<|assistant|>\n4<|endoftext|>"
    assert said == [*TOKENIZER.encode("4"), TOKENIZER.eos]


def test_a_template_that_takes_back_what_it_wrote_is_refused():
    source = (
        "{% for m in messages %}"
        "{{ '-' if m.role == 'assistant' and not loop.last else m.content }}|{% endfor %}"
    )
    assert told(source, TWO[:3])[1] == TOKENIZER.encode("4|")
    with pytest.raises(InputError, match="writes before message 5 changes with what follows; cut"):
        told(source, TWO)


def test_a_template_that_asks_otherwise_than_it_writes_is_refused():
    source = CHATML.replace("<|im_start|>assistant\n' }}{% endif", "<think>' }}{% endif")
    assert source != CHATML
    with pytest.raises(InputError, match="to ask for message 2 is not how it begins to write"):
        told(source, TWO[1:3])


def test_no_day_is_written():
    """Else what a record is would change overnight, and the cache would not know."""
    source = "{{ strftime_now('%d') if strftime_now is defined else 'some day' }}" + CHATML
    assert TOKENIZER.decode(told(source, TWO[1:3])[0]).startswith("some day<|im_start|>")


def test_tools_are_told_of():
    source = "{{ tools[0].name if tools else 'none' }}" + CHATML
    tokens, _ = template(source).told(TWO[1:3], 0, [{"name": "add<|im_end|>"}])
    assert TOKENIZER.decode(tokens).startswith("add<|im_end|><|im_start|>")
    assert tokens[:4] == [*TOKENIZER.encode("add<")]
    with pytest.raises(InputError, match="it knows no calls of functions"):
        told(PLAIN, [TWO[1], {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}])


def test_files_of_all_kinds_say_the_same(tmp_path):
    records = [{"messages": TWO[1:3]}, {"prompt": "a", "completion": "b"}]
    lines = written(tmp_path / "a.jsonl", records)
    (tmp_path / "b.json").write_text(json.dumps(records))
    table = pyarrow.Table.from_pylist(
        [{**dict.fromkeys(("messages", "prompt", "completion")), **r} for r in records]
    )
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    path = str(tmp_path / "d.arrow")
    with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    want = encoded(lines)
    assert len(want) == 2
    for name in ("b.json", "c.parquet", "d.arrow"):
        found = encoded(tmp_path / name)
        np.testing.assert_array_equal(found.tokens[:], want.tokens[:])
        np.testing.assert_array_equal(found.offsets, want.offsets)


def test_documents_come_back(tmp_path):
    pairs = [
        {"prompt": "a", "chosen": "b", "rejected": "cc"},
        {"prompt": "d", "chosen": "e", "rejected": "f"},
    ]
    made = encoded(written(tmp_path / "pairs.jsonl", pairs), Wanted.PAIR)
    again = encoded(tmp_path / "pairs.jsonl", Wanted.PAIR)
    assert (made.of, len(made), len(made.lengths)) == (2, 2, 4)
    tokens, which = again.document(1)
    assert TOKENIZER.decode(tokens[which][:-1]) == "cc"
    assert tokens[which][-1] == END
    judged = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    assert encoded(written(tmp_path / "judged.jsonl", judged), Wanted.JUDGED).good.tolist() == [
        1,
        0,
    ]


def test_copies_stay_on_one_side(tmp_path):
    records = [{"prompt": str(n % 7), "completion": "b"} for n in range(21)]
    made = encoded(written(tmp_path / "chats.jsonl", records))
    training, held_out = made.split(0.2, longest=100)
    assert sorted([*training, *held_out]) == list(range(21))
    assert not {n % 7 for n in training} & {n % 7 for n in held_out}
    same = encoded(written(tmp_path / "same.jsonl", records[:1] * 3))
    with pytest.raises(DataError, match="3 examples fit into .*, and 1 of them say different"):
        same.split(0.2, longest=100)


@pytest.mark.catches("held-out-may-be-too-long")
def test_both_sides_fit_and_have_enough(tmp_path):
    """With a share that would hold out nothing, and lengths of which few fit."""
    records = [{"prompt": "x" * n, "completion": "b"} for n in range(40)]
    made = encoded(written(tmp_path / "chats.jsonl", records))
    longest = int(np.sort(made.lengths)[9])
    for least in (1, 2, 5):
        training, held_out = made.split(1e-9, longest=longest, least=least)
        assert len(held_out) == least and len(training) == 10 - least
        assert made.lengths[[*training, *held_out]].max() <= longest
    with pytest.raises(DataError, match="10 examples fit .* 10 of them say different.*; 12 are"):
        made.split(0.1, longest=longest, least=6)
    with pytest.raises(DataError, match="rows have 3 tokens, and the shortest example needs"):
        made.split(0.1, longest=3)


def test_answers_know_what_ends_them(tmp_path):
    path = written(tmp_path / "chats.jsonl", [{"messages": TWO}])
    assert encoded(path).ends() == {END}
    assert encoded(path, source=PLAIN).ends() == {TOKENIZER.eos}


def test_the_wrong_row_is_named(tmp_path):
    good = {"prompt": "a", "completion": "b"}
    path = written(tmp_path / "chats.jsonl", [good, good, {"prompt": "a"}])
    with pytest.raises(DataError, match=r"chats\.jsonl, line 3: holds no conversation"):
        encoded(path)
    fails = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}" + CHATML
    path = written(tmp_path / "long.jsonl", [good, {"messages": TWO}])
    with pytest.raises(DataError, match=r"long\.jsonl, line 2: .*template refuses them \(too many"):
        encoded(path, source=fails)
    (tmp_path / "chats.txt").write_text("a")
    with pytest.raises(DataError, match=r"chats\.txt: conversations are read of \.jsonl"):
        encoded(tmp_path / "chats.txt")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no record"):
        encoded(tmp_path / "empty.jsonl")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="give one list of objects"):
        encoded(tmp_path / "bad.json")
    (tmp_path / "bad2.json").write_text("[1]")
    with pytest.raises(DataError, match=r"bad2\.json, entry 1: is no object"):
        encoded(tmp_path / "bad2.json")
    (tmp_path / "raw.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"raw\.jsonl, line 1: is not UTF-8"):
        encoded(tmp_path / "raw.jsonl")
    with pytest.raises(InputError, match="template is none .*; give another"):
        template("{% for %}")
