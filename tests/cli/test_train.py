"""`colossax train` as a user meets it, in this process and on its eight devices."""

import json
import re

import pytest

from colossax.cli import main
from tests.train.launching import SMALL, metrics, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("cli") / "text")


@pytest.fixture
def train(text, tmp_path, monkeypatch, capfd):
    """Runs `colossax train` and gives (exit code, JSON objects, standard error)."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(text.parent / "cache"))
    monkeypatch.chdir(tmp_path)

    def train(*arguments, data=text):
        code = main(["train", *SMALL, "--data", str(data), *arguments])
        out, errors = capfd.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], errors

    return train


def test_a_run_tells_its_steps_and_its_end(train, tmp_path):
    code, lines, errors = train("--steps=4", "--plan.batch.accumulation=1")
    assert code == 0, errors
    *steps, last = lines
    assert [list(step) for step in steps] == [
        ["step", "loss", "grad_norm", "tokens", "tokens_per_s"]
    ] * 4
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(0 < step["tokens"] <= 8 * 64 for step in steps)
    assert list(last) == ["final"]
    final = last["final"]
    assert (final["step"], final["loss"]) == (4, steps[-1]["loss"])
    assert final["tokens"] == sum(step["tokens"] for step in steps)
    assert (final["stopped_by"], final["skipped"], final["completion"]) == (None, 0, None)
    assert final["out"] == "runs/llama_tiny-001"
    out = tmp_path / final["out"]
    recorded = metrics(out)
    assert [row[1] for row in recorded[:4]] == [step["loss"] for step in steps]
    assert recorded[4] == (4, None, final["validation_loss"])
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["4"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").iterdir())
    assert f"unigram entropy: {final['unigram_entropy']:.4f} nats per token" in errors
    assert "fsdp=8" in errors


def test_losses_depend_on_the_seed_and_not_on_the_mesh(train):
    def losses(*arguments):
        code, lines, errors = train("--steps=3", *arguments)
        assert code == 0, errors
        return [line["loss"] for line in lines[:-1]]

    first = losses()
    assert losses("--seed=0") == first
    assert losses("--plan.mesh=data=2,fsdp=2,tensor=2") == pytest.approx(first, rel=1e-5)
    other = losses("--seed=1")
    assert all(a != pytest.approx(b, rel=1e-3) for a, b in zip(first, other, strict=True))


MISTAKES = [
    (["--plan.mesh=fsdp=3"], "plan.mesh fsdp=3: the sizes multiply to 3, but there are 8 devices"),
    (["--plan.mesh=tensor=8"], "dim 'heads' has size 4, which mesh axis 'tensor' of 8 devices"),
    (["--plan.preset=zero4"], "no preset is called 'zero4'; did you mean 'zero3'?"),
    (["--plan.mash=fsdp=8"], "unknown override --plan.mash; did you mean '--plan.mesh'?"),
    (["--stepz=4"], "unknown option --stepz; did you mean '--steps'?"),
    (["--steps=0"], "steps: found 0; give 1 or more"),
    (["--steps=many"], "--steps: expected int, found 'many'"),
    (["--data.seq_len=512"], "data.seq_len: 512 is above the model's 256"),
    (["--data.global_batch=12"], "12 rows cannot be cut into 1 microbatches for 8 devices"),
    (["--optimizer.name=adamv"], "optimizer.name: unknown 'adamv'; did you mean 'adamw'?"),
    (["--data.tokenizer_vocab=600"], "has 600 tokens, more than the model's vocabulary of 512"),
    (["--data.tokenizer_vocab=none"], "give the model's own with --data.tokenizer FILE"),
    (["--resume"], "--resume: which run is not said"),
    (["--resume", "--out=new"], "--resume: new holds no run"),
    (["--devices=9"], "--devices 9: there are 8 cpu devices; ask for 8 or fewer"),
    (["--process-id=0"], "--coordinator: not given"),
]


@pytest.mark.parametrize("arguments, message", MISTAKES, ids=[m[0][0] for m in MISTAKES])
def test_a_mistake_is_one_sentence_and_writes_nothing(
    train, tmp_path, monkeypatch, arguments, message
):
    # The devices of this process are made already.
    monkeypatch.setattr("colossax.cli.train.request_host_devices", lambda count: None)
    text_arguments = [] if "--model.heads" in arguments else ["--model.heads=4"]
    code, lines, errors = train(*text_arguments, *arguments)
    assert (code, lines) == (2, [])
    assert re.fullmatch(r"colossax: [^\n]*\n", errors), errors
    assert message in errors
    assert not list(tmp_path.iterdir()), "something was written"


def bad_utf8(folder):
    (folder / "bad.txt").write_bytes(b"good \xff bad")
    return f"{folder / 'bad.txt'}: is not UTF-8 (byte 5 is 0xff)"


def missing_field(folder):
    (folder / "a.jsonl").write_text('{"text": "fine"}\n{"txt": "not"}\n')
    return f"{folder / 'a.jsonl'}, line 2: has no field 'text'"


def torn_parquet(folder):
    (folder / "a.parquet").write_bytes(b"PAR1 and no more")
    return f"{folder / 'a.parquet'}: is no whole Parquet file"


def nothing(folder):
    return f"{folder}: holds no files"


@pytest.mark.parametrize("spoil", [bad_utf8, missing_field, torn_parquet, nothing])
def test_bad_data_is_one_sentence(train, tmp_path, spoil):
    folder = tmp_path / "data"
    folder.mkdir()
    message = spoil(folder)
    code, lines, errors = train("--out=run", data=folder)
    assert (code, lines) == (2, [])
    assert re.fullmatch(r"colossax: [^\n]*\n", errors), errors
    assert message in errors
    assert not (tmp_path / "run").exists()


def test_undecodable_text_is_left_out_when_asked(train, text, tmp_path):
    folder = write_text(tmp_path / "data")
    bad_utf8(folder)
    code, _, errors = train("--steps=1", "--data.skip_undecodable=true", data=folder)
    assert code == 0, errors


def test_a_full_disk_ends_the_checkpoint_but_not_the_run(train, tmp_path):
    """The folder of checkpoints cannot be made; the steps go on and the exit says so."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    code, lines, errors = train("--steps=3", "--checkpoint-every=1", "--out=run")
    assert code == 0, errors
    assert [line["step"] for line in lines[:-1]] == [1, 2, 3]
    assert "could not be saved" in errors and "training goes on" in errors


def test_a_run_without_a_recipe_is_resumed_as_it_was(train):
    assert train("--steps=2", "--out=run", "--seed=5")[0] == 0
    code = main(["train", "--resume", "--out=run", "--steps=3"])
    assert code == 0
    assert [row[0] for row in metrics_of("run")] == [1, 2, 2, 3, 3]


def metrics_of(out):
    from pathlib import Path

    return metrics(Path(out))


@pytest.mark.parametrize("arguments, code", [([], 0), (["--help"], 0), (["--version"], 0)])
def test_help_is_there(arguments, code, capsys):
    assert main(arguments) == code
    assert "colossax" in capsys.readouterr().out


def test_the_options_of_train_are_listed(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["train", "--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for part in ("--out DIR", "--optimizer.peak_lr", "--plan.preset", "llama3_70b", "--process-id"):
        assert part in shown, part


def test_a_misspelt_verb_is_named(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "colossax: no verb is called 'trian'; did you mean 'train'?\n"
