"""Hugging Face folders through a checkpoint and back, bit by bit and in little memory."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from colossax.checkpoint import Checkpointer, RecordReader, RecordWriter, slot_of
from colossax.config import Plan, to_json
from colossax.data import Tokenizer
from colossax.errors import CheckpointError, InputError, WeightsError
from colossax.models import config_from_json, maker
from colossax.models.hf import export_checkpoint, import_checkpoint, read_params
from colossax.models.hf_folder import conversion_of
from colossax.nn import describe
from tests.cases import quick_first
from tests.models.synthetic import sparse_folder

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


def weights(folder):
    """All tensors of a folder, read by the safetensors library."""
    files = sorted(folder.glob("model*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_same_weights(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].tobytes() == value.tobytes(), name


def variant(tmp_path, case, edit, **settings):
    """A golden folder, single file, with its tensors edited and its settings changed."""
    target = tmp_path / "variant"
    target.mkdir()
    config = {**json.loads((GOLDEN / case / "config.json").read_text()), **settings}
    (target / "config.json").write_text(json.dumps(config))
    save_file(edit(weights(GOLDEN / case)), target / "model.safetensors")
    return target


def round_trip(source, tmp_path, **options):
    import_checkpoint(source, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export", **options)
    return tmp_path / "export"


@pytest.mark.parametrize("case", quick_first(CASES, 8))
def test_there_and_back(case, tmp_path):
    out = round_trip(GOLDEN / case, tmp_path)
    (again, params), (one, original) = map(read_params, (out, GOLDEN / case))
    assert again == one
    jax.tree.map(np.testing.assert_array_equal, params, original)
    aside = conversion_of(json.loads((GOLDEN / case / "config.json").read_text())).of(one).ignored

    def read(folder):  # what is left aside may be missing behind, or hold nothing
        found = weights(folder).items()
        return {n: x for n, x in found if not any(re.fullmatch(p, n) for p in aside)}

    assert_same_weights(read(out), read(GOLDEN / case))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "export"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2", "opt", "bloom", "qwen3"])
def test_there_and_back_with_a_head_of_its_own(case, tmp_path):
    def edit(tensors):
        shape = max((v.shape for v in tensors.values() if v.shape[0] == 128), key=len)
        head = np.random.default_rng(0).normal(size=(128, shape[1])).astype(np.float32)
        return {**tensors, "lm_head.weight": head}

    source = variant(tmp_path, case, edit, tie_word_embeddings=False)
    assert_same_weights(weights(round_trip(source, tmp_path)), weights(source))


def test_there_and_back_in_half_precision(tmp_path):
    def edit(tensors):
        return {
            name: value.astype(np.float32 if "norm" in name else ml_dtypes.bfloat16)
            for name, value in tensors.items()
        }

    source = variant(tmp_path, "qwen3", edit)
    out = round_trip(source, tmp_path)
    assert_same_weights(weights(out), weights(source))
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"


def test_export_in_shards(tmp_path):
    out = round_trip(GOLDEN / "bloom", tmp_path, max_shard_bytes=50_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 5
    assert_same_weights(weights(out), weights(GOLDEN / "bloom"))
    import_checkpoint(out, tmp_path / "again")
    export_checkpoint(tmp_path / "again", tmp_path / "whole")
    assert_same_weights(weights(tmp_path / "whole"), weights(GOLDEN / "bloom"))


def test_restored_onto_devices_in_two_segments(tmp_path, devices):
    """The checkpoint is one that training and serving restore, on any mesh."""
    import_checkpoint(GOLDEN / "llama", tmp_path / "checkpoint")
    config, params = read_params(GOLDEN / "llama")
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    infos = describe(maker(config)).infos
    slots = [slot_of(info, "model/params") for info in jax.tree.leaves(infos)]
    arrays = Checkpointer(tmp_path / "checkpoint").restore(None, [(s, sharding) for s in slots])
    for found, wanted in zip(arrays, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_documents(tmp_path):
    plan = Plan(mesh={"fsdp": 4, "tensor": 2})
    import_checkpoint(GOLDEN / "mistral", tmp_path / "checkpoint", plan)
    documents = RecordReader(tmp_path / "checkpoint").documents()
    assert config_from_json(documents["model"]) == read_params(GOLDEN / "mistral")[0]
    assert documents["plan"] == json.loads(plan.to_json()) == to_json(plan)
    assert documents.keys() == {"model", "plan"}
    import_checkpoint(GOLDEN / "mistral", tmp_path / "plain")
    assert RecordReader(tmp_path / "plain").documents().keys() == {"model"}


def test_folder_of_a_run_and_of_a_step(tmp_path):
    import_checkpoint(GOLDEN / "opt", tmp_path / "run" / "checkpoints")
    export_checkpoint(tmp_path / "run", tmp_path / "one", step=0)
    export_checkpoint(tmp_path / "run" / "checkpoints" / "0", tmp_path / "two")
    for name in ("one", "two"):
        assert_same_weights(weights(tmp_path / name), weights(GOLDEN / "opt"))


def small_tokenizer(folder, **words):
    """A tokenizer.json whose token 2, the golden models' end of text, is `<eos>`."""
    words = {"a": 0, "b": 1, "<eos>": 2, "</s>": 3, **words}
    model = tokenizers.models.WordLevel(words, unk_token="a")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["</s>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_tokenizer_comes_along(tmp_path):
    source = variant(tmp_path, "llama", dict)
    small_tokenizer(source)
    out = round_trip(source, tmp_path)
    stored = Tokenizer.from_json(RecordReader(tmp_path / "checkpoint").documents()["tokenizer"])
    assert stored.end == "<eos>"
    original, exported = (json.loads((f / "tokenizer.json").read_text()) for f in (source, out))
    assert exported == original
    assert Tokenizer.from_file(out) == stored


def test_nothing_is_written_for_a_folder_that_does_not_fit(tmp_path):
    def edit(tensors):
        return {n: v for n, v in tensors.items() if n != "model.layers.1.mlp.up_proj.weight"}

    source = variant(tmp_path, "llama", edit)
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight;"):
        import_checkpoint(source, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_tokenizer_that_is_none(tmp_path):
    source = variant(tmp_path, "llama", dict)
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: is no tokenizer\.json"):
        import_checkpoint(source, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_tokenizer_of_a_larger_model(tmp_path):
    source = variant(tmp_path, "llama", dict)
    small_tokenizer(source, **{f"word{i}": 4 + i for i in range(125)})
    with pytest.raises(InputError, match=r"has 129 tokens, but config\.json gives the model 128;"):
        import_checkpoint(source, tmp_path / "checkpoint")


def test_import_over_a_checkpoint(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="already holds step 0; choose"):
        import_checkpoint(GOLDEN / "gpt2", tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")


def test_export_over_something(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "checkpoint")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "notes").write_text("mine")
    with pytest.raises(InputError, match="export: is there already; name a new folder"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    assert (tmp_path / "export" / "notes").read_text() == "mine"


def test_export_to_where_nothing_can_be_written(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "checkpoint")
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match=r"export: cannot be written \(Not a directory\); make room"
    ):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "file" / "export")


def test_export_of_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="checkpoint"):
        export_checkpoint(tmp_path / "missing", tmp_path / "export")


def write_records(out, documents, edit=lambda records: records):
    """A checkpoint of the golden Llama's parameters, edited."""
    config, params = read_params(GOLDEN / "llama")
    infos = jax.tree.leaves(describe(maker(config)).infos)
    records = {
        slot_of(info, "model/params").name: (value, info.stacked)
        for info, value in zip(infos, jax.tree.leaves(params), strict=True)
    }
    with RecordWriter(out) as writer:
        for name, (value, layered) in edit(records).items():
            writer.declare(name, value.shape, value.dtype, layered=layered)
            for layer in range(len(value)) if layered else [None]:
                writer.write(
                    name, np.ascontiguousarray(value if layer is None else value[layer]), layer
                )
        writer.finish(documents)


def model_document():
    return {"model": {"family": "llama", **to_json(read_params(GOLDEN / "llama")[0])}}


def test_export_of_another_kind_of_model(tmp_path):
    write_records(tmp_path / "checkpoint", {})
    with pytest.raises(CheckpointError, match="does not say which model it is of"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda r: {n: v for n, v in r.items() if n != "model/params/norm/scale"},
            "lacks 'model/params/norm/scale' for the model",
        ),
        (
            lambda r: {**r, "model/params/more": (np.ones(3, np.float32), False)},
            "has besides 'model/params/more' for the model",
        ),
        (
            lambda r: {**r, "model/params/norm/scale": (np.ones(3, np.float32), False)},
            r"'model/params/norm/scale' is float32\[3\] where its model has \[32\]",
        ),
        (
            lambda r: {**r, "model/params/norm/scale": (np.ones(32, np.int32), False)},
            r"'model/params/norm/scale' is int32\[32\] where its model has \[32\] of a floating",
        ),
    ],
)
def test_export_of_other_parameters_than_the_model_has(edit, message, tmp_path):
    write_records(tmp_path / "checkpoint", model_document(), edit)
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_export_leaves_out_the_optimizer(tmp_path):
    def edit(records):
        return {**records, "model/optimizer/mu/norm/scale": (np.ones(32, np.float32), False)}

    write_records(tmp_path / "checkpoint", model_document(), edit)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    assert_same_weights(weights(tmp_path / "export"), weights(GOLDEN / "llama"))


def test_export_that_fails_half_way_leaves_nothing(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "checkpoint")
    record = tmp_path / "checkpoint" / "0" / "arrays" / "model" / "params" / "norm.scale" / "c"
    shutil.rmtree(record)
    with pytest.raises(CheckpointError, match="damaged"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


PEAK = """
import sys
from colossax.models.hf import export_checkpoint, import_checkpoint

def kilobytes(field):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field + ":")))

verb, source, target = sys.argv[1:]
before = kilobytes("VmRSS")
{"import": import_checkpoint, "export": export_checkpoint}[verb](source, target)
print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
def test_peak_host_memory_of_forty_layers(tmp_path):
    """Import and export need little more than the largest tensor, however deep the model is."""
    sizes = sparse_folder(
        tmp_path / "source",
        model_type="llama",
        vocab_size=8_000,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
    )
    allowed = 2 * max(sizes.values()) + 500_000_000
    assert sum(sizes.values()) > 1.3 * allowed
    source, checkpoint, out = (str(tmp_path / name) for name in ("source", "checkpoint", "export"))
    for verb, start, end in [("import", source, checkpoint), ("export", checkpoint, out)]:
        environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
        ran = subprocess.run(
            [sys.executable, "-c", PEAK, verb, start, end],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert int(ran.stdout) <= allowed, verb
        shutil.rmtree(start)


@pytest.mark.catches("export-without-end")
def test_a_model_that_names_no_end_of_text_gets_its_tokenizer_s(tmp_path):
    source, out = variant(tmp_path, "llama", dict, eos_token_id=None), tmp_path / "hf"
    small_tokenizer(source)
    import_checkpoint(source, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", out)
    about = json.loads((out / "tokenizer_config.json").read_text())
    end = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")).token_to_id(
        about["eos_token"]
    )
    for file in ("config.json", "generation_config.json"):
        assert json.loads((out / file).read_text())["eos_token_id"] == end, file
