"""A base in codes from the command line: trained beside, resumed elsewhere, merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.checkpoint import find_checkpoint
from colossax.cli import main
from colossax.inference.loading import open_checkpoint
from colossax.models.parameters import params_of_checkpoint
from colossax.nn.quantised.codes import quantised
from colossax.sharding import use
from tests.launching import metrics, write_text

BASE = (
    "llama_tiny --model.layers=2 --model.embed=128 --model.mlp=128 --model.heads=4"
    " --model.kv_heads=2 --model.vocab=300 --data.tokenizer_vocab=300 --data.seq_len=32"
    " --data.global_batch=4 --data.validation_batches=1 --sample.prompt= --trackers=json --json"
).split()
BESIDE = "--init=base --adapter.rank=4 --optimizer.peak_lr=0.02 --optimizer.schedule_steps=4"
ONE = "--plan.mesh=fsdp=1", "--devices=1"
FOUR = "--plan.mesh=fsdp=2,tensor=2", "--devices=4"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A base of one step, and beside its codes an adapter of four, and of two and two."""
    assert len(jax.devices()) == 8
    folder = tmp_path_factory.mktemp("quantised")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        text = f"--data={write_text(folder / 'text')}"
        trained("base", text, "--steps=1", *ONE)
        beside = text, *BESIDE.split(), "--adapter.base=nf4"
        trained("whole", *beside, "--steps=4", *FOUR)
        trained("run", *beside, "--steps=2", *ONE)
        assert main(["train", "--out=run", "--resume", "--steps=4", *FOUR]) == 0
        yield folder


def trained(out, *words, code=0):
    assert main(["train", *BASE, f"--out={out}", *words]) == code


def losses(run):
    return [loss for _, loss, _ in metrics(run) if loss]


def logits(run):
    loaded = open_checkpoint(run).load(devices=jax.devices()[:1])
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 300, (2, 16)), jnp.int32)
    with use(loaded.bound):
        model = loaded.spec.merge(loaded.params)
        return np.asarray(model.hidden(tokens)[0] @ model.head_weight())


@pytest.mark.slow
def test_a_run_beside_codes_goes_on_elsewhere_as_if_nothing_had_happened(folder):
    whole, parts = losses(folder / "whole"), losses(folder / "run")
    assert len(parts) == 4
    np.testing.assert_allclose(parts, whole, rtol=2e-5)
    assert whole[-1] < whole[0]


@pytest.mark.slow
@pytest.mark.catches("base-read-without-its-rows")
def test_codes_are_those_of_the_matrices_in_the_base(folder):
    loaded = open_checkpoint("run").load(devices=jax.devices()[:2])
    base = params_of_checkpoint(find_checkpoint("base"))
    infos, params = jax.tree.leaves(loaded.spec.infos), jax.tree.leaves(loaded.params)
    found = [(info, x) for info, x in zip(infos, params, strict=True) if info.quantised is not None]
    assert len(found) == 2 * 7
    for info, x in found:
        for row in range(2):
            w = base.read(info.stood_at, row, None)
            wanted = quantised(info.quantised.of, jnp.asarray(w))[info.quantised.name]
            np.testing.assert_array_equal(x[row], wanted, err_msg=info.path)


@pytest.mark.slow
def test_checkpoints_refer_to_the_base(folder):
    names = {name for name in find_checkpoint("run").records() if "/params/" in name}
    assert names and all(name.endswith(("/down", "/up")) for name in names)
    assert find_checkpoint("run").document("adapter", dict)["base"] == "nf4"


@pytest.mark.slow
@pytest.mark.catches("merged-without-codes")
def test_merged_it_is_what_the_codes_stand_for(folder, capsys):
    assert main(["export", "run", "merged", "--merge", "--as-checkpoint"]) == 0
    base, merged = (params_of_checkpoint(find_checkpoint(name)) for name in ("base", "merged"))
    own, found = (one.read("layers/mlp/up/w", 1, None) for one in (base, merged))
    blocks = found.reshape(2, 64, -1)
    counts = {len(np.unique(blocks[i, :, j])) for i in range(2) for j in range(8)}
    assert max(counts) <= 16
    assert 0 < np.abs(own - found).max() < 0.16 * np.abs(own).max()
    beside, alone = logits("run"), logits("merged")
    assert np.abs(beside - alone).max() <= 1e-5
    assert np.abs(alone - logits("base")).max() > 1e-2
    words = "--prompt=abc", "--max-tokens=12", "--temperature=0", "--json", "--devices=1"
    said = []
    for run in ("run", "merged"):
        capsys.readouterr()
        assert main(["generate", run, *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_one_sentence(folder, capsys):
    text = f"--data={folder / 'text'}"
    for words, message in (
        (["--adapter.base=fp4", "--adapter.rank=2"], "adapter.base"),
        (["--adapter.base=nf4"], "give adapter.rank, or adapter.base own"),
        (["--adapter.base=int8", "--adapter.rank=2", "--adapter.double=true"], "adapter.double"),
    ):
        capsys.readouterr()
        trained("not", text, "--init=base", *words, code=2)
        err = capsys.readouterr().err
        assert message in err and err.startswith("colossax: ") and err.count("\n") <= 2
