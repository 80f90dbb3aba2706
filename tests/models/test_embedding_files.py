"""Folders of `sentence-transformers`: what they say of pooling is read, kept and written again."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colossax.errors import InputError
from colossax.inference import open_checkpoint
from colossax.models import config_from_json, config_to_json
from colossax.models.hf import export_checkpoint, import_checkpoint
from colossax.models.hf_folder import open_folder, read_params
from colossax.nn import HeadConfig
from tests.models.test_parity import GOLDEN

KINDS = ("Transformer", "Pooling", "Normalize")
FLAGS = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def write(folder, **files):
    for name, value in files.items():
        place = folder / {"modules": "modules.json", "pooling": "1_Pooling/config.json"}.get(
            name, f"{name}.json"
        )
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(value))


def modules(*kinds, path="1_Pooling"):
    return [
        {"idx": i, "name": str(i), "path": path if i == 1 else "", "type": f"a.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]


@pytest.fixture
def folder(tmp_path):
    """Golden BERT as a class without a head has its weights, saying nothing of pooling yet."""
    made = tmp_path / "hf"
    made.mkdir()
    settings = json.loads((GOLDEN / "bert" / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(settings | {"architectures": ["BertModel"]}))
    tensors = load_file(GOLDEN / "bert" / "model.safetensors")
    kept = {name: array for name, array in tensors.items() if name.startswith("bert.")}
    save_file({n.removeprefix("bert."): a for n, a in kept.items()}, made / "model.safetensors")
    return made


@pytest.mark.catches("pooling-of-files")
@pytest.mark.parametrize(
    ("kinds", "pooling", "head"),
    [
        (KINDS, FLAGS, HeadConfig(pool="mean", normalise=True)),
        (KINDS[:2], {"pooling_mode_cls_token": True}, HeadConfig(pool="first")),
        (KINDS, {"pooling_mode": "lasttoken"}, HeadConfig(pool="last", normalise=True)),
    ],
)
def test_read_kept_and_written_again(folder, tmp_path, kinds, pooling, head):
    write(folder, modules=modules(*kinds), pooling=pooling)
    assert open_folder(folder).config.head == head
    import_checkpoint(folder, tmp_path / "checkpoint")
    assert open_checkpoint(tmp_path / "checkpoint").model.head == head
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    (config, params), (again, others) = (read_params(f) for f in (folder, tmp_path / "export"))
    assert config == again == config_from_json(config_to_json(config))
    assert all(np.array_equal(*pair) for pair in zip(leaves(params), leaves(others), strict=True))
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert written["architectures"] == ["BertModel"] and "id2label" not in written


def leaves(tree):
    return [x for one in tree.values() for x in (leaves(one) if isinstance(one, dict) else [one])]


def test_a_head_of_the_vocabulary_in_such_files_is_left_out(folder):
    shutil.copy(GOLDEN / "bert" / "model.safetensors", folder)
    write(folder, modules=modules(*KINDS), pooling=FLAGS)
    assert not any("transform" in path for path in open_folder(folder).infos)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"modules": modules("Transformer", "Pooling", "Dense"), "pooling": FLAGS},
            "modules Transformer, Pooling, Dense are not supported; only Transformer, then Pooling",
        ),
        ({"modules": {}}, "modules.json"),
        ({"modules": [3]}, r"modules \(none\)|modules  are not supported"),
        (
            {"modules": modules(*KINDS), "pooling": {"pooling_mode_max_tokens": True}},
            "pooling 'pooling_mode_max_tokens' is not supported; only one of cls, mean, lasttoken",
        ),
        (
            {"modules": modules(*KINDS), "pooling": dict.fromkeys(FLAGS, True)},
            r"pooling \['pooling_mode_cls_token', 'pooling_mode_mean_tokens'\] is not supported",
        ),
        (
            {"modules": modules(*KINDS), "pooling": FLAGS | {"include_prompt": False}},
            "include_prompt false is not supported",
        ),
        ({"modules": modules(*KINDS)}, "config.json"),
        (
            {"modules": modules(*KINDS, path="../elsewhere"), "pooling": FLAGS},
            "path '../elsewhere' is no folder beside it",
        ),
        (
            {
                "modules": modules(*KINDS),
                "pooling": FLAGS,
                "sentence_bert_config": {"do_lower_case": True},
            },
            "do_lower_case is not supported",
        ),
        (
            {
                "modules": modules(*KINDS),
                "pooling": FLAGS,
                "config_sentence_transformers": {"default_prompt_name": "query"},
            },
            "default_prompt_name 'query' is not supported; put the prompt before the texts",
        ),
    ],
)
def test_what_is_not_supported_is_refused(folder, files, message):
    write(folder, **files)
    with pytest.raises(InputError, match=message):
        open_folder(folder)


def test_a_pooling_that_files_have_no_place_for(folder, tmp_path):
    write(folder, modules=modules(*KINDS), pooling=FLAGS)
    import_checkpoint(folder, tmp_path / "checkpoint")

    def two(params):
        import dataclasses

        head = HeadConfig(pool="first_mean")
        return dataclasses.replace(params, config=dataclasses.replace(params.config, head=head))

    with pytest.raises(InputError, match="model.head.pool: 'first_mean' cannot be exported"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "export", alter=two)
    assert not (tmp_path / "export").exists()
