"""Models are read from the folder of a run that goes on: whole, or refused in a sentence."""

import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from colossax.checkpoint import Checkpointer, slot_of
from colossax.errors import CheckpointError
from colossax.inference import open_checkpoint
from colossax.models import LlamaConfig, config_to_json, maker
from colossax.models.hf import export_checkpoint
from colossax.nn import describe

CONFIG = LlamaConfig(vocab=300, embed=32, layers=4, heads=2, kv_heads=2, mlp=32, max_seq=64)


@contextlib.contextmanager
def saving(folder, *, keep):
    """A run that saves as fast as it can; all parameters of a step are its number."""
    infos = jax.tree.leaves(describe(maker(CONFIG)).infos)
    slots = [slot_of(info, "model/params") for info in infos]
    begun, ended = threading.Event(), threading.Event()

    def run():
        with Checkpointer(folder / "checkpoints", keep=keep) as checkpointer:
            for step in itertools.count(1):
                if ended.is_set():
                    return
                arrays = [jnp.full(info.shape, float(step)) for info in infos]
                documents = {"model": config_to_json(CONFIG)}
                checkpointer.save(step, list(zip(slots, arrays, strict=True)), documents)
                if step > 2:
                    begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("verb", ["export", "load"])
def test_a_step_is_read_whole_or_not_at_all(tmp_path, verb):
    read, refused = 0, set()
    with saving(tmp_path, keep=1):
        for number in range(25):
            try:
                found = exported(tmp_path, number) if verb == "export" else loaded(tmp_path)
            except CheckpointError as problem:
                refused.add(str(problem).replace(str(tmp_path), ""))
                assert not (tmp_path / f"hf{number}").exists()
            else:
                read += 1
                assert len(found) == 1, "numbers of several steps"
    assert read
    for sentence in refused:
        assert "as a run that goes on deletes all but its latest" in sentence


def exported(folder, number):
    reader = export_checkpoint(folder, folder / f"hf{number}")
    weights = load_file(folder / f"hf{number}" / "model.safetensors")
    found = {float(x) for values in weights.values() for x in np.unique(values)}
    assert found == {float(reader.step)}
    return found


def loaded(folder):
    stored = open_checkpoint(folder)
    leaves = jax.tree.leaves(stored.load(devices=jax.devices()[:1]).params)
    return {float(x) for leaf in leaves for x in np.unique(leaf)}
