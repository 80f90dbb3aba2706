"""Optimizer state on disk: the ordinary step's numbers, and a run that survives being killed."""

import json
import random
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from colossax.checkpoint import Checkpointer
from colossax.config import OffloadConfig
from colossax.errors import OffloadError, PlanError
from colossax.optim import adamw
from colossax.run.checkpointing import RunCheckpoints
from colossax.run.initial import check_owner
from tests.launching import Started, metrics, run, write_text
from tests.step.offloaded.streamed import FULL, batch, by_path, host, started, stepped

ALL = {"parameters": 1.0, "optimizer": 1.0, "disk": 1.0}
HALF = {"parameters": 0.5, "optimizer": 0.75, "disk": 0.5}
CLIP = 0.5


def on_disk(shares, **settings):
    return FULL.replace(offload=OffloadConfig(**shares, **settings))


def losses_of(state, step, **how):
    """(state, losses)."""
    state, found = stepped(state, step, **how)
    return state, [metrics["loss"] for metrics in found]


def checkpoints(folder, step):
    return RunCheckpoints(folder, step, keep=2, documents={}, report=pytest.fail)


@pytest.fixture(scope="module")
def ordinary():
    """Losses of the ordinary step, and the state after it, by path."""
    state, step = started(FULL, adamw(1e-3), clip_norm=CLIP)
    state, losses = losses_of(state, step)
    return losses, by_path(step, state["params"])


@pytest.mark.parametrize(
    "shares", [pytest.param(ALL, marks=pytest.mark.sweep), HALF], ids=["all", "half"]
)
def test_it_trains_as_the_ordinary_step_and_its_checkpoints_are_the_same(
    shares, ordinary, tmp_path
):
    losses, params = ordinary
    state, step = started(on_disk(shares), adamw(1e-3), clip_norm=CLIP, disk=tmp_path / "disk")
    state, found = losses_of(state, step)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    for name, mine in by_path(step, state["params"]).items():
        np.testing.assert_allclose(mine, params[name], atol=3e-7, err_msg=name)
    saved = checkpoints(tmp_path / "saved", step)
    saved.save(state, len(losses))
    saved.finish()
    more = [batch(len(losses)), batch(len(losses) + 1)]
    wanted = losses_of(state, step, batches=more)[1]
    step.disk.close()
    # It goes on without a disk, and with another file, as if nothing had been.
    _, plain = started(FULL, adamw(1e-3), clip_norm=CLIP)
    _, other = started(on_disk(shares), adamw(1e-3), clip_norm=CLIP, disk=tmp_path / "other")
    for again in (plain, other):
        restored = checkpoints(tmp_path / "saved", again).restore(len(losses))
        np.testing.assert_allclose(losses_of(restored, again, batches=more)[1], wanted, rtol=1e-6)


def test_where_every_layer_is_on_disk_its_file_holds_the_whole_state(tmp_path):
    state, step = started(on_disk(ALL), adamw(1e-3), disk=tmp_path)
    state, losses = losses_of(state, step)
    assert step.disk.latest() == len(losses)
    cost = step.disk.cost()
    assert cost.file_bytes == step.disk.path.stat().st_size
    assert cost.layers == len(state["params"]["layers"]["segments"][0]["attn"]["q"]["w"])
    assert 2 * cost.read_bytes < cost.file_bytes < 2.2 * cost.read_bytes
    held = step.disk.restore()
    for (path, wanted), found in zip(
        jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(held), strict=True
    ):
        assert found.sharding == wanted.sharding, path
        np.testing.assert_array_equal(found, wanted, err_msg=str(path))


def test_no_copy_of_what_left_the_device_is_made_for_a_checkpoint(tmp_path, monkeypatch):
    found = []
    original = Checkpointer.__init__

    def init(self, folder, **settings):
        found.append(settings["asynchronous"])
        original(self, folder, **settings)

    monkeypatch.setattr(Checkpointer, "__init__", init)
    for plan, disk in ((FULL, None), (host(), None), (on_disk(ALL), tmp_path / "disk")):
        checkpoints(tmp_path / "saved", started(plan, adamw(1e-3), disk=disk)[1])
    assert found == [True, False, False]


def test_so_it_does_on_several_devices(devices, tmp_path):
    plan = on_disk(ALL).replace(mesh={"fsdp": 8})
    state, step = started(plan, adamw(1e-3), devices=devices, disk=tmp_path)
    _, plain = started(FULL.replace(mesh={"fsdp": 8}), adamw(1e-3), devices=devices)
    state, losses = losses_of(state, step, steps=2)
    np.testing.assert_allclose(losses, losses_of(plain.init(0), plain, steps=2)[1], rtol=1e-6)
    for wanted, found in zip(
        jax.tree.leaves(state), jax.tree.leaves(step.disk.restore()), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.catches("metrics-of-another-step")
def test_the_file_holds_the_metrics_of_the_last_two_steps(tmp_path):
    state, step = started(on_disk(ALL), adamw(1e-3), disk=tmp_path)
    assert step.disk.metrics() == {}
    state, found = stepped(state, step)
    names = ("loss", "grad_norm", "tokens", "skipped")
    wanted = {at: {name: found[at - 1][name] for name in names} for at in (4, 5)}
    assert len(found) == 5 and step.disk.metrics() == wanted
    step.disk.close()
    assert step.disk.metrics() == wanted


@pytest.mark.catches("old-store-without-room")
def test_a_file_from_before_it_held_metrics_is_gone_on_from_and_made_anew_when_filled(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as before:
        before.setattr("colossax.step.offloaded.disk._METRICS_BYTES", 0)
        state, step = started(on_disk(ALL), adamw(1e-3), disk=tmp_path)
    state, _ = stepped(state, step, steps=2)
    assert (step.disk.latest(), step.disk.metrics()) == (2, {})
    for wanted, found in zip(
        jax.tree.leaves(state), jax.tree.leaves(step.disk.restore()), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    stepped(step.init(0), step, steps=1)
    assert list(step.disk.metrics()) == [1]


@pytest.mark.catches("disk-store-keeps-its-owner")
@pytest.mark.catches("disk-store-of-any-run")
def test_the_file_of_another_run_is_not_gone_on_from(tmp_path):
    _, step = started(on_disk(ALL), adamw(1e-3), disk=tmp_path)
    check_owner(step.disk, {"seed": 1})
    step.disk.owner = json.dumps({"seed": 0})
    stepped(step.init(0), step, steps=2)
    assert step.disk.cost().file_bytes == step.disk.path.stat().st_size
    step.disk.close()
    check_owner(step.disk, {"seed": 0})
    with pytest.raises(OffloadError, match="layers.state' is of another run: seed is 0 there and"):
        check_owner(step.disk, {"seed": 1})
    step.disk.owner = json.dumps({"seed": 1})
    step.init(0)
    assert step.disk.found_owner == '{"seed": 1}' and step.disk.latest() == 0


def test_a_full_disk_stops_the_step_and_keeps_the_state_before_it(tmp_path, monkeypatch):
    state, step = started(on_disk(ALL), adamw(1e-3), disk=tmp_path)
    state, _ = losses_of(state, step, steps=1)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OffloadError, match="No space left"):
        patched.setattr("os.pwrite", refuse)
        patched.setattr("os.pwritev", refuse)
        step(state, batch(1))
    assert int(step.disk.restore()["step"]) == 1


def test_what_cannot_be_is_refused():
    with pytest.raises(PlanError, match="disk: it is not said where; give a folder as disk=FOLDER"):
        started(on_disk(ALL), adamw(1e-3))
    with pytest.raises(PlanError, match="disk: 0.5 is above plan.offload.optimizer 0.25"):
        OffloadConfig(disk=0.5, optimizer=0.25)
    with pytest.raises(PlanError, match="from gradients that are kept; give clipping stack"):
        OffloadConfig(disk=0.5, optimizer=1.0, clipping="two_pass")


def test_such_a_step_is_no_pure_function(tmp_path):
    state, step = started(on_disk(ALL), adamw(1e-3), disk=tmp_path)
    with pytest.raises(PlanError, match="is no pure function; call the step itself"):
        jax.eval_shape(step.pure, state, batch(0))


STEPS = 30
RUN = (
    f"--steps={STEPS}",
    "--validate-every=3",
    "--checkpoint-every=8",
    "--plan.offload=parameters=1,optimizer=1,disk=1",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("disk") / "text")


@pytest.fixture(scope="module")
def killed(text, tmp_path_factory):
    """A run killed at a random moment, the step it had reported, and a run that nobody touched."""
    folder = tmp_path_factory.mktemp("killed")
    whole = run(*RUN, f"--out={folder / 'whole'}", text=text, log=folder / "whole.log")
    assert whole.code == 0, whole.errors
    process = Started(*RUN, f"--out={folder / 'run'}", text=text, log=folder / "log").until(10)
    time.sleep(random.uniform(0, 0.3))
    left = process.send(signal.SIGKILL).finish()
    assert left.code == -signal.SIGKILL, "it had finished; kill it earlier"
    last = max(left.losses)
    for made in (folder / "run" / "checkpoints").iterdir():
        if made.name.isdecimal() and int(made.name) >= last:
            shutil.rmtree(made)  # the file is read where it is newer than they are
    return folder / "run", last, metrics(folder / "whole")


def resumed(folder, text, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(folder, out)
    done = run(*RUN, f"--out={out}", "--resume", text=text, log=tmp_path / "log")
    assert done.code == 0, done.errors
    return done, metrics(out)


def test_a_killed_run_goes_on_from_the_step_that_its_file_holds(killed, text, tmp_path):
    folder, last, whole = killed
    done, rows = resumed(folder, text, tmp_path)
    step = int(re.search(r"resumed from step (\d+), which .*layers.state holds", done.errors)[1])
    # The step reported last is done; metrics are read while the next one runs.
    assert step >= last
    recorded = [at for at, loss, _ in metrics(folder) if loss is not None and at <= step]
    assert step - 2 <= len(recorded) <= step
    assert list(done.losses) == list(range(len(recorded) + 1, STEPS + 1))
    assert rows == whole


@pytest.mark.parametrize("share", [0, 0.25], ids=["commits too", "records"])
def test_with_damaged_records_it_goes_on_from_the_last_checkpoint(killed, text, tmp_path, share):
    folder, _, whole = killed
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    file = damaged / "offload" / "layers.state"
    data = bytearray(file.read_bytes())
    for at in range(4096 + int(share * len(data)) + 2000, len(data), 4096):  # of both epochs
        data[at] ^= 1
    file.write_bytes(data)
    done, rows = resumed(damaged, text, tmp_path)
    assert re.search(r"layers.state'.*; resuming from the last checkpoint", done.errors)
    assert re.search(r"resumed from step (8|16|24) of", done.errors)
    assert rows == whole
