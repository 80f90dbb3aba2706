"""Checkpoints read for inference, onto other meshes than the one that wrote them."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import colossax
from colossax.checkpoint import Checkpointer, slot_of
from colossax.cli import main
from colossax.config import PipelineConfig, Plan, Precision, Segment, to_json
from colossax.data import Documents, train_tokenizer
from colossax.errors import CheckpointError
from colossax.inference import Generator, inference_plan, load, open_checkpoint
from colossax.models import LlamaConfig, config_to_json, maker
from colossax.nn import describe, initialise
from tests.cases import quick_first

CONFIG = LlamaConfig(
    vocab=300, embed=64, layers=3, heads=8, kv_heads=2, mlp=96, max_seq=64, init_std=0.3
)
PROMPT = (5, 17, 250, 3, 99)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the cat sat on the mat and the dog sat on the log " * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        return train_tokenizer(text_documents(folder), 300)


def text_documents(folder) -> Documents:
    from colossax.data import path_documents

    return path_documents(folder)


@pytest.fixture(scope="module")
def expected():
    """Parameters on one device, and what they continue the prompt with."""
    bound = Plan().bind(jax.devices()[:1])
    spec = describe(maker(CONFIG))
    params = initialise(spec, bound, jax.random.key(1))
    tokens = Generator(spec, bound, params).generate(PROMPT, max_tokens=8).tokens
    return spec, params, tokens


def write(folder, spec, params, **documents):
    """A checkpoint as a run writes it, with a record of another kind beside the parameters."""
    slots = [slot_of(i, "model/params", dtype=p.dtype) for i, p in pairs(spec, params)]
    moments = [slot_of(i, "model/optimizer/mu", dtype=p.dtype) for i, p in pairs(spec, params)]
    arrays = [p for _, p in pairs(spec, params)]
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(
            3,
            [*zip(slots, arrays, strict=True), *zip(moments, arrays, strict=True)],
            {"model": config_to_json(CONFIG), **documents},
        )


def pairs(spec, params):
    return list(zip(jax.tree.leaves(spec.infos), jax.tree.leaves(params), strict=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory, expected, tokenizer):
    """Folder of a run."""
    folder = tmp_path_factory.mktemp("run")
    spec, params, _ = expected
    write(folder / "checkpoints", spec, params, tokenizer=tokenizer.to_json(), plan=to_json(Plan()))
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory, expected):
    """A checkpoint with neither tokenizer nor plan, in bf16."""
    folder = tmp_path_factory.mktemp("bare")
    spec, params, _ = expected
    write(folder, spec, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    return folder


def test_a_run_a_checkpoint_folder_and_a_step_all_load(run, expected):
    for path in (run, run / "checkpoints", run / "checkpoints" / "3"):
        stored = open_checkpoint(path)
        assert (stored.directory, stored.step) == (run / "checkpoints", 3)
    model = load(run, devices=jax.devices()[:1])
    assert model.generator().generate(PROMPT, max_tokens=8).tokens == expected[2]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(mesh={"fsdp": 2, "tensor": 4}),
        Plan(mesh={"data": 4, "tensor": 2}, segments=(Segment(count=1), Segment())),
    ],
)
def test_another_mesh_gives_the_same_parameters_and_tokens(run, expected, plan, devices):
    model = load(run, plan, devices)
    _, params, tokens = expected
    table = model.params["embed"]["table"]
    np.testing.assert_array_equal(table, params["embed"]["table"])
    whole = np.prod(table.shape) // np.prod(table.addressable_shards[0].data.shape)
    assert whole == model.bound.size(("fsdp", "tensor"))
    assert model.generator().generate(PROMPT, max_tokens=8).tokens == tokens


@pytest.mark.parametrize("cuts", quick_first([None, "auto", "2,1"], ["auto"]))
def test_layers_that_stages_do_not_divide_run_as_one_stack(run, expected, cuts):
    plan = Plan(mesh={"stage": 2, "fsdp": 1}, pipeline=PipelineConfig(cuts=cuts))
    generator = load(run, plan, jax.devices()[:2]).generator()
    assert "3 layers cannot be shared evenly, so every device gathers" in generator.notice
    assert generator.generate(PROMPT, max_tokens=8).tokens == expected[2]


def test_parameters_keep_the_type_they_are_stored_in(bare, run):
    half = load(bare, devices=jax.devices()[:1])
    assert half.params["embed"]["table"].dtype == jnp.bfloat16
    assert half.bound.plan.precision.compute == "bfloat16"
    assert half.generator().program.cache.empty()["k"].dtype == jnp.bfloat16
    full = load(bare, Plan(precision=Precision()), jax.devices()[:1])
    assert full.params["embed"]["table"].dtype == jnp.float32
    assert open_checkpoint(run).precision == Precision()


def test_a_run_computes_as_it_was_trained(tmp_path, expected):
    plan = Plan(precision=Precision(compute="bfloat16"))
    write(tmp_path, *expected[:2], plan=to_json(plan))
    found = open_checkpoint(tmp_path).plan.precision
    assert (found.params, found.compute, found.cache) == ("float32", "bfloat16", "bfloat16")


def test_the_tokenizer_ends_a_sequence_where_the_model_names_no_end(run, bare, tokenizer):
    devices = jax.devices()[:1]
    assert load(run, devices=devices).generator().eos == tokenizer.eos
    assert load(bare, devices=devices).generator().eos is None


def test_an_inference_plan_splits_neither_batch_nor_sequence():
    plan = inference_plan(
        colossax.preset("zero3+megatron_sp", mesh={"fsdp": 4}, segments=(Segment(remat="full"),))
    )
    assert set(plan.rules.activations) == {"heads", "kv_heads", "mlp", "vocab"}
    assert plan.segments == (Segment(),) and "embed" in plan.rules.params


def test_wrong_checkpoints_are_refused(tmp_path, run, expected, tokenizer):
    with pytest.raises(CheckpointError, match=r"'.*nowhere' does not exist"):
        load(tmp_path / "nowhere")
    spec, params, _ = expected
    slots = [(slot_of(i, "model/params"), p) for i, p in pairs(spec, params)]
    with Checkpointer(tmp_path / "a") as checkpointer:
        checkpointer.save(0, slots, {})
    with pytest.raises(CheckpointError, match=r"step 0 names no model; give one that"):
        load(tmp_path / "a")
    smaller = {**config_to_json(CONFIG), "vocab": 200}
    write(tmp_path / "b", spec, params, model=smaller, tokenizer=tokenizer.to_json())
    with pytest.raises(CheckpointError, match=r"its tokenizer has \d+ tokens and its model 200"):
        load(tmp_path / "b")


def test_a_damaged_record_is_refused(tmp_path, run):
    shutil.copytree(run / "checkpoints", tmp_path / "c")
    files = [f for f in (tmp_path / "c").rglob("*") if f.is_file() and "params" in str(f)]
    biggest = max(files, key=lambda f: f.stat().st_size)
    biggest.write_bytes(biggest.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"is damaged: record 'model/params/.*restore it"):
        load(tmp_path / "c", devices=jax.devices()[:1])


def command(*words, capsys):
    """Exit code, standard output and standard error of a verb."""
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_the_command_line_generates(run, tokenizer, expected, capsys):
    ids = ",".join(map(str, PROMPT))
    code, out, _ = command(
        *("generate", run, "--prompt-tokens", ids, "--max-tokens", 8, "--json"), capsys=capsys
    )
    found = json.loads(out)
    assert code == 0 and found == {
        "text": tokenizer.decode(expected[2]),
        "tokens": list(expected[2]),
        "prompt_tokens": list(PROMPT),
    }
    words = ("generate", run, "--prompt", "the cat", "--max-tokens", 4, "--temperature", 2)
    code, text, _ = command(*words, "--plan.mesh", "fsdp=4,tensor=2", capsys=capsys)
    code, out, _ = command(*words, "--json", capsys=capsys)
    found = json.loads(out)
    assert found["prompt_tokens"] == tokenizer.encode("the cat")
    assert len(found["tokens"]) == 4 and text == f"the cat{found['text']}\n"


@pytest.mark.catches("stage-cut-for-training")
@pytest.mark.catches("stage-gathers-unsaid")
def test_several_prompts_go_through_the_stages_each_as_if_alone(run, tokenizer, expected, capsys):
    """However the plan cuts the layers for training."""
    ids = ",".join(map(str, PROMPT))
    more = ("--max-tokens", 8, "--json", "--devices", 3, "--plan.mesh", "stage=3")
    several = ("--prompt-tokens", ids, "--prompt-tokens", "1,2", "--prompt-tokens", ids)
    code, out, said = command(
        "generate", run, *several, *more, "--plan.pipeline.chunks", 3, capsys=capsys
    )
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "gathers" not in said
    assert [one["prompt_tokens"] for one in found] == [list(PROMPT), [1, 2], list(PROMPT)]
    assert found[0]["tokens"] == found[2]["tokens"] == list(expected[2]) != found[1]["tokens"]
    code, out, said = command(
        "generate", run, *several[:2], *more, "--plan.offload", "parameters=1", capsys=capsys
    )
    assert json.loads(out)["tokens"] == list(expected[2])
    assert "mesh axis 'stage': layers live in host memory, so every device gathers" in said


@pytest.mark.catches("generate-of-any-step")
def test_it_says_which_step_it_uses_and_takes_one_by_number(bare, expected, tmp_path, capsys):
    spec, params, _ = expected
    folder = tmp_path / "run"
    write(folder, spec, params)
    (folder / "9").mkdir()
    words = ("generate", folder, "--prompt-tokens", "1,2", "--max-tokens", 2)
    step = Checkpointer(folder).latest()
    for more in ((), ("--step", step)):
        code, _, error = command(*words, *more, capsys=capsys)
        assert code == 0
        assert f"step {step} of {folder}; step 9 is broken: 'arrays' is missing in it" in error
    code, out, error = command(*words, "--step", 9, capsys=capsys)
    assert code == 2 and not out and f"holds no step 9; choose one of {step}" in error


@pytest.mark.catches("forged-documents")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", None, "document 'model' is null, not an object"),
        ("model", [1], "document 'model' is a list, not an object"),
        ("model", {"family": ["llama"]}, "no family is called ['llama']"),
        ("models", [1], "document 'models' is a list, not an object"),
        ("plan", "zero3", "document 'plan' is a text, not an object"),
        ("tokenizer", {"a": 1}, "document 'tokenizer' is an object, not a text"),
        ("tokenizer", "[" * 9**5, "tokenizer"),
    ],
)
def test_forged_documents_are_refused_in_one_sentence(
    expected, tmp_path, capsys, name, value, message
):
    spec, params, _ = expected
    write(tmp_path, spec, params, **{name: value})
    for words in (
        ("generate", tmp_path, "--prompt-tokens", "1,2"),
        *((("export", tmp_path, tmp_path / "hf"),) if name == "model" else ()),
    ):
        code, out, error = command(*words, capsys=capsys)
        assert code == 2 and not out, error
        assert message in error and error.count("\n") == 1 and len(error) < 900


def test_a_continuation_fills_the_sequence_where_no_length_is_asked(bare, capsys):
    ids = ",".join("1" * 60)
    _, out, _ = command("generate", bare, "--prompt-tokens", ids, capsys=capsys)
    assert len(out.strip().split(",")) == 4


def test_ids_are_shown_where_there_is_no_tokenizer(bare, capsys):
    words = ("generate", bare, "--prompt-tokens", "1,2", "--max-tokens", 3)
    code, out, _ = command(*words, capsys=capsys)
    assert code == 0 and len(out.strip().split(",")) == 3
    _, out, _ = command(*words, "--json", capsys=capsys)
    assert json.loads(out)["text"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--prompt or --prompt-tokens: found neither; give one of them"),
        (["--prompt", "a", "--prompt-tokens", "1"], "found both; give one of them"),
        (["--prompt", ""], "--prompt: it is empty; give a word or more to continue"),
        (["--prompt-tokens", "1,x"], "--prompt-tokens: found '1,x'; give ids divided by commas"),
        (["--prompt-tokens", "300"], "token 300 is outside the vocabulary of 300; use ids from 0"),
        (
            ["--prompt-tokens", "1,2", "--max-tokens", "63"],
            "a prompt of 2 and 63 more make 65 tokens, above the longest sequence of 64; ask for"
            " at most 62",
        ),
        (["--prompt-tokens", "1", "--temperature", "-1"], "found -1.0; give 0 (greedy) or more"),
        (["--prompt-tokens", ",".join("1" * 64)], "it has 64 tokens, and at most 63 leave room"),
        (["--prompt-tokens", "1", "--plan.mesh", "tensor=3"], "the sizes multiply to 3, but there"),
        (["--prompt-tokens", "1", "--plan.mash", "a=1"], "unknown override --plan.mash"),
        (["--prompt-tokens", "1", "--sead", "1"], "unknown option --sead; did you mean '--seed'?"),
    ],
)
def test_wrong_command_lines_exit_2(run, capsys, words, message):
    code, out, error = command("generate", run, *words, capsys=capsys)
    assert code == 2 and not out
    assert error.startswith("colossax: ") and message in error and error.count("\n") == 1


def test_text_without_a_tokenizer_names_the_way_out(bare, capsys):
    code, _, error = command("generate", bare, "--prompt", "a", capsys=capsys)
    assert code == 2 and "holds no tokenizer; give token ids with --prompt-tokens 1,2,3" in error


@pytest.mark.catches("top-p-unheard")
@pytest.mark.catches("top-k-unheard")
@pytest.mark.catches("min-p-unheard")
def test_draws_among_few_tokens(run, capsys):
    """Among one they are the likeliest; among a few likely ones others than among all."""
    words = ("generate", run, "--prompt-tokens", "5,17,250", "--max-tokens", 12, "--devices", 1)

    def said(*more):
        code, out, _ = command(*words, *more, capsys=capsys)
        assert code == 0
        return out

    hot, greedy = ("--temperature", 3, "--seed", 4), said()
    free = said(*hot)
    assert free != greedy
    for name, narrow, few in (("--top-k", 1, 4), ("--top-p", 0.0001, 0.3), ("--min-p", 1, 0.5)):
        assert said(*hot, name, narrow) == greedy
        assert said(*hot, name, few) not in (greedy, free)
    stages = "--top-p=0.5", "--plan.mesh=stage=3", "--devices=3"
    code, _, error = command(*words, *hot, *stages, capsys=capsys)
    assert code == 2 and "top_p: found 0.5, and with stages" in error
