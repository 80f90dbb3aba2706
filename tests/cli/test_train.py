"""`colossax train` as a user meets it, in this process and on its eight devices."""

import contextlib
import io
import json
import re
import shutil

import jax
import pytest

from colossax.cli import main
from colossax.cli.options.arguments import Parser, split_overrides
from colossax.cli.train import UNFINISHED, add_arguments, configure
from colossax.config import OffloadConfig, Segment
from colossax.processes import EXIT_CODES
from colossax.recipes import recipe
from colossax.run import RunFolder
from colossax.tasks.config import train_config_to_json
from tests.launching import SMALL, metrics, write_text

STEPS = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("cli") / "text")


@pytest.fixture(scope="module", autouse=True)
def patched(text):
    """Caches go to a folder that is new; all devices are there before a run asks for one."""
    assert len(jax.devices()) == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(text.parent / "cache"))
        yield patch


def train(*arguments, data=None, devices=1, recipe=SMALL):
    """Run `colossax train`; gives (exit code, JSON objects, standard error)."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        source = [f"--data={data}"] if data else []
        code = main(["train", *recipe, f"--devices={devices}", *source, *arguments])
    return code, [json.loads(line) for line in out.getvalue().splitlines()], errors.getvalue()


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory, patched):
    """One run to the end, in a folder that is given no name."""
    folder = tmp_path_factory.mktemp("whole")
    patched.chdir(folder)
    code, lines, errors = train(f"--steps={STEPS}", data=text)
    assert code == 0, errors
    return folder / "runs" / "llama_tiny-001", lines, errors


def losses(lines):
    return [line["loss"] for line in lines if "step" in line]


@pytest.mark.sentinel
def test_a_run_tells_its_steps_and_its_end(whole):
    out, lines, errors = whole
    *steps, last = lines
    assert [list(step) for step in steps] == [
        ["step", "loss", "grad_norm", "tokens", "tokens_per_s"]
    ] * STEPS
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(0 < step["tokens"] <= 8 * 64 for step in steps)
    assert list(last) == ["final"]
    final = last["final"]
    assert (final["step"], final["checkpoint"]) == (STEPS, STEPS)
    assert final["loss"] == steps[-1]["loss"]
    assert final["tokens"] == sum(step["tokens"] for step in steps)
    assert (final["stopped_by"], final["skipped"], final["completion"]) == (None, 0, None)
    assert final["out"] == "runs/llama_tiny-001"
    assert f"unigram entropy: {final['unigram_entropy']:.4f} nats per token" in errors
    held_out = (STEPS, None, final["validation_loss"])
    assert metrics(out) == [(i + 1, loss, None) for i, loss in enumerate(losses(lines))] + [
        held_out
    ]


def test_a_run_leaves_checkpoint_picture_and_events(whole):
    out, _, _ = whole
    assert [p.name for p in (out / "checkpoints").iterdir()] == [str(STEPS)]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").iterdir())


def test_losses_depend_on_the_seed_and_not_on_the_mesh(whole, text, tmp_path):
    _, lines, _ = whole
    mesh = "--plan.mesh=data=2,fsdp=2,tensor=2"
    code, other, errors = train(
        f"--steps={STEPS}", mesh, f"--out={tmp_path / 'mesh'}", data=text, devices=8
    )
    assert code == 0, errors
    assert "on 8 cpu device(s) (data=2, fsdp=2, tensor=2)" in errors
    assert losses(other) == pytest.approx(losses(lines), rel=1e-5)
    code, other, errors = train("--steps=1", "--seed=1", f"--out={tmp_path / 'seed'}", data=text)
    assert code == 0, errors
    assert losses(other) != losses(lines)[:1]


def test_more_steps_keep_the_schedule_and_need_no_recipe(whole, text, tmp_path):
    """Longer by resuming equals longer from the start with the same schedule."""
    first, lines, _ = whole
    out = tmp_path / "run"
    shutil.copytree(first, out)
    steps = f"--steps={STEPS + 2}"
    assert main(["train", "--resume", f"--out={out}", "--devices=1", steps]) == 0
    code, once, errors = train(
        steps, f"--optimizer.schedule_steps={STEPS}", f"--out={tmp_path / 'once'}", data=text
    )
    assert code == 0, errors
    assert losses(once)[:STEPS] == losses(lines)
    assert [loss for _, loss, _ in metrics(out) if loss is not None] == losses(once)


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
    (
        ["--plan.offload.device_gb=8"],
        "plan.offload.device_gb: found 8, and only plan.offload auto keeps within it",
    ),
]


@pytest.mark.parametrize("arguments, message", MISTAKES, ids=[m[0][0] for m in MISTAKES])
def test_a_mistake_is_one_sentence_and_writes_nothing(
    text, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    code, lines, errors = train("--model.heads=4", *arguments, data=text, devices=8)
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
def test_bad_data_is_one_sentence(tmp_path, spoil):
    folder = tmp_path / "data"
    folder.mkdir()
    message = spoil(folder)
    code, lines, errors = train(f"--out={tmp_path / 'run'}", data=folder)
    assert (code, lines) == (2, [])
    assert re.fullmatch(r"colossax: [^\n]*\n", errors), errors
    assert message in errors
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_cannot_be_written_is_reported_and_training_goes_on(text, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "checkpoints").write_text("in the way")
    code, lines, errors = train("--steps=2", "--checkpoint-every=1", f"--out={out}", data=text)
    assert code == UNFINISHED, errors
    assert len(losses(lines)) == 2
    assert "could not be saved" in errors and "training goes on" in errors


@pytest.mark.parametrize("arguments, code", [([], 0), (["--help"], 0), (["--version"], 0)])
def test_help_is_there(arguments, code, capsys):
    assert main(arguments) == code
    assert "colossax" in capsys.readouterr().out


@pytest.mark.catches("exit-codes-untold")
def test_the_options_of_train_are_listed(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["train", "--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for part in ("--out DIR", "--optimizer.peak_lr", "--plan.preset", "llama3_70b", "--process-id"):
        assert part in shown, part
    codes = shown.rpartition("exit codes: ")[2]
    for code in (0, 2, UNFINISHED, *EXIT_CODES.values()):
        assert str(code) in codes.split(), code


@pytest.mark.catches("usage-error-code")
def test_a_misspelt_verb_is_named(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "colossax: no verb is called 'trian'; did you mean 'train'?\n"


def finetune(run, *arguments, data):
    """`colossax train finetune` from a run's checkpoint."""
    out, errors = io.StringIO(), io.StringIO()
    words = ["train", "finetune", f"--init={run}", "--json", "--devices=1", f"--data={data}"]
    small = ("--data.seq_len=64", "--steps=2", "--plan.offload.host_gb=1")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main([*words, *small, *arguments])
    return code, [json.loads(line) for line in out.getvalue().splitlines()], errors.getvalue()


def test_a_checkpoint_is_fine_tuned_within_a_memory_budget(whole, text, tmp_path):
    run, first, _ = whole
    budget = "--plan.offload.device_gb=1"
    code, lines, errors = finetune(run, budget, f"--out={tmp_path / 'all'}", data=text)
    assert code == 0, errors
    assert f"parameters from {run}" in errors
    needed_mb = float(re.search(r"([\d.]+) MB of a device", errors)[1])
    less = f"--plan.offload.device_gb={0.8 * needed_mb / 1e3}"
    code, tight, errors = finetune(run, less, f"--out={tmp_path / 'some'}", data=text)
    assert code == 0, errors
    assert float(re.search(r"([\d.]+) MB of a device", errors)[1]) <= 0.8 * needed_mb + 0.01
    assert losses(tight) == pytest.approx(losses(lines), rel=1e-6)
    # What is begun with is the run's model: its loss is below that of random parameters.
    assert losses(lines)[0] < losses(first)[0] - 0.03


def test_a_budget_that_is_missing_or_too_small_is_one_sentence(whole, text, tmp_path):
    run, _, _ = whole
    out = tmp_path / "out"
    code, _, errors = finetune(run, f"--out={out}", data=text)
    assert code == 2 and "give how much of it may be used" in errors
    code, _, errors = finetune(run, "--plan.offload.device_gb=0.001", f"--out={out}", data=text)
    assert code == 2 and "even with every layer in host memory" in errors
    code, _, errors = finetune(tmp_path / "none", f"--out={out}", data=text)
    assert code == 2 and "none" in errors
    assert not out.exists()


def configured(*words):
    plain, overrides = split_overrides(list(words))
    parser = Parser(prog="train", description="")
    add_arguments(parser, "train")
    return configure(parser.parse(plain), overrides)


@pytest.mark.catches("resumed-with-a-longer-schedule")
def test_resumed_by_its_folder_alone_a_run_goes_on_with_the_plan_that_ran(tmp_path):
    offload = OffloadConfig(parameters=0.5, optimizer=0.5, fused=True, cpu_update=0.25)
    config = recipe("llama_tiny")
    ran = config.plan.replace(segments=(Segment(remat="full"),), offload=offload)
    RunFolder(path=tmp_path).write(train_config_to_json(config.replace(plan=ran)), {})
    words = ("--resume", f"--out={tmp_path}", "--steps=10000")
    found = configured(*words)
    assert (found.plan, found.steps, found.schedule_steps) == (ran, 10000, config.steps)
    assert configured("llama_tiny", *words).schedule_steps == config.steps
    assert configured(*words, "--plan.offload=auto").plan.offload.auto, "decided again"


@pytest.mark.catches("question-recorded")
def test_a_run_goes_on_with_the_cuts_that_were_found_and_finds_them_again_if_asked(
    whole, text, tmp_path
):
    out, found = f"--out={tmp_path}", ["--plan.pipeline.cuts=auto", "--plan.pipeline.speeds=1,3"]
    plan = ["--plan.mesh=stage=2", *found, f"--optimizer.schedule_steps={STEPS}"]
    code, first, errors = train("--steps=2", *plan, out, data=text, devices=2)
    assert code == 0, errors
    assert (
        "plan.pipeline.cuts auto: layers 1,1, cut evenly; speeds 1,3 of the stages, as given"
        in errors
    )
    code, rest, errors = train("--resume", "--json", f"--steps={STEPS}", out, devices=2, recipe=[])
    assert code == 0 and "cuts auto" not in errors, errors
    assert losses([*first, *rest]) == pytest.approx(losses(whole[1]), rel=1e-5)
    ran = configured("--resume", out).plan.pipeline
    assert (ran.cuts, ran.speeds, ran.order) == ((1, 1), (1.0, 3.0), None)
    assert configured("--resume", out, "--plan.pipeline.cuts=auto").plan.pipeline.cuts == "auto"
    none = ("--plan.pipeline.cuts=none", "--plan.pipeline.speeds=none", "--plan.mesh=fsdp=2")
    again = f"--steps={STEPS + 1}"
    code, _, errors = train("--resume", again, out, *none, devices=2, recipe=[])
    assert code == 0 and "resumed from step 3" in errors, errors


def test_a_mixture_of_whole_documents_goes_on_as_it_began(text, tmp_path):
    other = write_text(tmp_path / "other", documents=6)
    mixture = f"--data.mixture={text}=3,{other}=1"
    once = train(mixture, "--data.packing=whole", "--steps=3", f"--out={tmp_path / 'once'}")
    twice = ("--data.packing=whole", f"--out={tmp_path / 'twice'}")
    part = train(mixture, *twice, "--steps=2", "--optimizer.schedule_steps=3")
    assert (once[0], part[0]) == (0, 0), once[2] + part[2]
    resume = (f"--out={tmp_path / 'twice'}", "--steps=3", "--resume", "--json")
    code, rest, errors = train(*resume, recipe=[])
    assert code == 0, errors
    assert losses(part[1]) + losses(rest) == losses(once[1])
    assert "text: 25.0% other: " in errors and "cut off after" in errors
    assert rest[-1]["final"]["validation_loss"] == once[1][-1]["final"]["validation_loss"]
    code, _, errors = train(*twice, f"--data.mixture={text}=1,{other}=1", "--resume", "--steps=4")
    assert code == 2 and "data.mixture is" in errors
