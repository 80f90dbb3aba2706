"""Chat templates come with a folder, stay with a checkpoint and go back."""

import json

import pytest

from colossax.checkpoint import RecordReader
from colossax.data import Chat
from colossax.errors import InputError
from colossax.models.hf import export_checkpoint, import_checkpoint
from tests.models.test_parity import GOLDEN

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def folder(tmp_path, about=None, generation=None, template=None):
    for name, value in (("tokenizer_config", about), ("generation_config", generation)):
        if value is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


@pytest.mark.catches("template-of-any-name")
@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, Chat()),
        ({"template": TEMPLATE}, Chat(template=TEMPLATE)),
        (
            {"about": {"chat_template": TEMPLATE, "bos_token": "<s>"}},
            Chat(template=TEMPLATE, bos="<s>"),
        ),
        ({"about": {"bos_token": {"content": "<b>"}, "chat_template": None}}, Chat(bos="<b>")),
        (
            {
                "about": {
                    "chat_template": [
                        {"name": "x", "template": "no"},
                        {"name": "default", "template": TEMPLATE},
                    ]
                }
            },
            Chat(template=TEMPLATE),
        ),
        ({"about": {"chat_template": "old"}, "template": TEMPLATE}, Chat(template=TEMPLATE)),
        ({"generation": {"eos_token_id": 7}}, Chat(ends=(7,))),
        ({"generation": {"eos_token_id": 0}}, Chat(ends=(0,))),
        ({"generation": {"eos_token_id": [7, 9]}}, Chat(ends=(7, 9))),
    ],
    ids=str,
)
def test_what_a_folder_says(given, expected, tmp_path):
    found = Chat.from_folder(folder(tmp_path, **given))
    assert found == expected and bool(found) == (expected != Chat())
    assert Chat.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    "given, message",
    [
        ({"about": {"chat_template": 3}}, "chat_template is no text"),
        ({"generation": {"eos_token_id": ["a"]}}, "which are no token ids"),
        ({"generation": {"eos_token_id": True}}, "which are no token ids"),
        ({"generation": {"eos_token_id": -1}}, "which are no token ids"),
    ],
)
def test_refusals(given, message, tmp_path):
    with pytest.raises(InputError, match=message):
        Chat.from_folder(folder(tmp_path, **given))


@pytest.mark.catches("template-is-dropped")
def test_in_and_out(tmp_path):
    """With a tokenizer, through a checkpoint, and out again as it came."""
    import shutil

    from tokenizers import Tokenizer, models

    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "llama", source)
    tokenizer = Tokenizer(models.WordLevel(vocab={"</s>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(source / "tokenizer.json"))
    about = {"bos_token": "<s>", "chat_template": TEMPLATE}
    folder(source, about=about, generation={"eos_token_id": [2, 5]})
    import_checkpoint(source, tmp_path / "checkpoint")
    document = RecordReader(tmp_path / "checkpoint", 0).document("chat", dict)
    assert Chat.from_json(document) == Chat(template=TEMPLATE, bos="<s>", ends=(2, 5))
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert Chat.from_folder(tmp_path / "out") == Chat.from_json(document)
