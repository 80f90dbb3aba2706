"""`colossax export --experts` and `--layers`: what is written, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from colossax.cli import main
from colossax.cli.options.experts import asked_experts, read_loads
from colossax.errors import InputError

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Golden models as checkpoints."""
    folder = tmp_path_factory.mktemp("imported")
    for case in ("mixtral", "llama"):
        assert main(["import", str(GOLDEN / case), str(folder / case)]) == 0
    return folder


def exported(*words):
    assert main(["export", *map(str, words)]) == 0


def tensors(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def settings(folder):
    return json.loads((folder / "config.json").read_text())


EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"


@pytest.mark.catches("least-used-kept")
def test_the_most_used_of_a_run_are_kept(imported, tmp_path):
    """By what its steps counted, on average."""
    whole, experts = tensors(GOLDEN / "mixtral"), settings(GOLDEN / "mixtral")["num_local_experts"]
    layers = settings(GOLDEN / "mixtral")["num_hidden_layers"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(imported / "mixtral")
    loads = np.zeros((layers, experts))
    loads[:, -1], loads[:, 1] = 1.0, 0.5
    loads[-1] = loads[-1][::-1]
    lines = [{"step": 1, "expert_load": (loads * 2).tolist()}, {"step": 1, "validation_loss": 2.0}]
    lines.append({"step": 2, "expert_load": (0 * loads).tolist()})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    np.testing.assert_allclose(read_loads(run / "metrics.jsonl"), loads)
    exported(run, tmp_path / "hf", "--experts", "prune=2")
    assert settings(tmp_path / "hf")["num_local_experts"] == 2
    found = tensors(tmp_path / "hf")
    for layer, kept in ((0, (1, experts - 1)), (layers - 1, (0, experts - 2))):
        for new, old in enumerate(kept):
            one, other = found[EXPERT.format(layer, new)], whole[EXPERT.format(layer, old)]
            np.testing.assert_array_equal(one, other)
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        np.testing.assert_array_equal(found[name], whole[name][list(kept)])


def test_upcycled_merged_and_a_student(imported, tmp_path):
    dense, sparse = imported / "llama", imported / "mixtral"
    exported(dense, tmp_path / "up", "--experts", "upcycle=3", "--as-checkpoint")
    exported(tmp_path / "up", tmp_path / "hf")
    found, whole = tensors(tmp_path / "hf"), tensors(GOLDEN / "llama")
    assert settings(tmp_path / "hf")["architectures"] == ["MixtralForCausalLM"]
    for expert in range(3):
        copied = found[EXPERT.format(1, expert)]
        np.testing.assert_array_equal(copied, whole["model.layers.1.mlp.gate_proj.weight"])
    exported(sparse, tmp_path / "merged", "--experts", f"merge={sparse}")
    twice = 2 * settings(GOLDEN / "mixtral")["num_local_experts"]
    assert settings(tmp_path / "merged")["num_local_experts"] == twice
    exported(dense, tmp_path / "student", "--layers", "1")
    assert settings(tmp_path / "student")["num_hidden_layers"] == 1
    name = "model.layers.{}.self_attn.q_proj.weight"
    np.testing.assert_array_equal(
        tensors(tmp_path / "student")[name.format(0)], whole[name.format(1)]
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mixtral", ("--experts", "prune=2,by=random,seed=3")),
        ("llama", ("--experts", "upcycle=4,choices=2,noise=0.01")),
        ("llama", ("--layers", "0")),
    ],
)
def test_what_is_written_loads_and_generates(case, words, imported, tmp_path, capsys):
    exported(imported / case, tmp_path / "out", *words, "--as-checkpoint")
    capsys.readouterr()
    asked = ("--prompt-tokens", "1,2,3", "--max-tokens", "5", "--json")
    assert main(["generate", str(tmp_path / "out"), *asked]) == 0
    one = json.loads(capsys.readouterr().out)["tokens"]
    exported(imported / case, tmp_path / "hf", *words)
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "again")]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "again"), *asked]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == one


REFUSED = {
    "prune": "give prune=K, upcycle=E or merge=CHECKPOINT",
    "prnue=4": "unknown 'prnue'; did you mean 'prune'",
    "prune=four": "prune is a whole number, found 'four'",
    "prune=4,by=size": "by 'size'",
    "prune=4,noise=1": "--experts prune: unknown option 'noise'",
    "prune=4,by=random,loads=x": "by=random asks for none",
    "prune=4,seed=1": "a seed is given, and only by=random draws; leave seed out",
    "prune=4,by=load,seed=1": "only by=random draws",
    "prune=4,by": "give by once, as by=...",
    "upcycle=4,noise=much": "noise is a number, found 'much'",
    "merge=a,seed=1": "--experts merge: unknown option 'seed'; it has no options",
    "prune=1,by=random": "1 experts are kept, and a token chooses 2",
    "prune=3": "no metrics.jsonl beside it that says how much",
    "prune=3,loads=missing.json": "missing.json: cannot be read",
    "upcycle=4": "a mixtral has experts already",
    "merge=nowhere": "'nowhere' does not exist",
}


@pytest.mark.catches("seed-of-no-draw")
@pytest.mark.parametrize("words", REFUSED)
def test_refusals_are_one_sentence_and_leave_nothing(
    words, imported, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(imported / "mixtral"), "out", "--experts", words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and REFUSED[words] in err, err
    assert list(tmp_path.iterdir()) == []


def test_loads_that_are_none_are_refused(tmp_path):
    for name, text in (("a.json", "[1, 2]"), ("b.json", "{}"), ("c.jsonl", '{"step": 1}\n')):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match="holds no expert_load"):
            read_loads(tmp_path / name)
    (tmp_path / "d.json").write_text('{"expert_load": [[0.5, 0.5]]}')
    np.testing.assert_array_equal(read_loads(tmp_path / "d.json"), [[0.5, 0.5]])
    assert asked_experts("upcycle=4,redrawn=0.5").options == {"redrawn": 0.5}
