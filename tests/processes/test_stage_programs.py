"""`colossax train` with a program per stage, each in a process of its own."""

import signal

import pytest

from tests.launching import metrics, pair, run, write_text

STAGES = (
    "--plan.mesh=stage=2,fsdp=2",
    "--plan.pipeline.microbatches=4",
    "--plan.pipeline.cuts=1,3",
)
ALIKE = ("--model.layers=4", "--optimizer.schedule_steps=50")


@pytest.mark.slow
def test_stages_of_two_processes_stop_and_go_on_elsewhere_and_back(tmp_path):
    """Told to stop, they save; one process takes it from there without stages, then two again."""
    text, log = write_text(tmp_path / "text"), tmp_path / "log"
    out = f"--out={tmp_path / 'run'}"
    two = ("--devices=2", *STAGES, *ALIKE, out)
    started = pair("--steps=100000", *two, text=text, folder=tmp_path)
    started[0].until(3)
    started[1].send(signal.SIGTERM)
    first, second = (process.finish() for process in started)
    assert (first.code, second.code) == (143, 143), first.errors + second.errors
    last = first.final["step"]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [str(last)]
    more = ("--devices=4", "--plan.mesh=fsdp=4", *ALIKE, out, "--resume")
    done = run(f"--steps={last + 1}", *more, text=text, log=log)
    assert done.code == 0, done.errors
    arguments = (f"--steps={last + 2}", *two, "--resume")
    first, second = (process.finish() for process in pair(*arguments, text=text, folder=tmp_path))
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    whole = ("--devices=4", *STAGES, *ALIKE, f"--out={tmp_path / 'alone'}")
    alone = run(f"--steps={last + 2}", *whole, text=text, log=log)
    assert alone.code == 0, alone.errors
    want, got = (
        {step: loss for step, loss, _ in metrics(tmp_path / name) if loss is not None}
        for name in ("alone", "run")
    )
    assert got == pytest.approx(want, rel=1e-5)


AVERAGES = {
    "ema": ("--optimizer.ema=0.6",),
    "schedule free": ("--optimizer.name=schedule_free", "--optimizer.schedule=constant"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_are_judged_where_stages_have_processes(tmp_path, kind):
    """Each process has those of its own stage alone; the loss is that of any other mesh."""
    text = write_text(tmp_path / "text")
    same = ("--steps=3", "--validate-every=3", "--optimizer.peak_lr=0.02", *ALIKE, *AVERAGES[kind])
    words = ("--devices=2", *STAGES, f"--out={tmp_path / 'run'}")
    first, second = (one.finish() for one in pair(*same, *words, text=text, folder=tmp_path))
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    words = ("--devices=4", "--plan.mesh=fsdp=4", f"--out={tmp_path / 'flat'}")
    flat = run(*same, *words, text=text, log=tmp_path / "log")
    assert flat.code == 0, flat.errors
    found, wanted = (one.final["validation_loss"] for one in (first, flat))
    assert found == pytest.approx(wanted, rel=2e-5)
