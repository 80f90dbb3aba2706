"""Several adapters beside one base, which is held once."""

import json

import jax
import pytest

from colossax.cli import main
from colossax.errors import CheckpointError
from colossax.inference.loading import open_checkpoint
from tests.launching import write_text

BASE = (
    "llama_tiny --model.layers=2 --model.embed=128 --model.mlp=128 --model.heads=4"
    " --model.kv_heads=2 --model.vocab=300 --data.tokenizer_vocab=300 --data.seq_len=32"
    " --data.global_batch=8 --data.validation_batches=1 --sample.prompt= --trackers=json --json"
    " --plan.mesh=fsdp=2,tensor=2 --devices=4"
).split()
LEARNS = "--init=base", "--adapter.rank=2", "--optimizer.peak_lr=0.05", "--steps=3"
ADAPTERS = {
    "low": ["--adapter.alpha=4"],
    "high": ["--adapter.alpha=64"],  # arrays as those of the first
    "wide": ["--adapter.targets=attn/*,mlp/*", "--adapter.dora=true"],
    "coded": ["--adapter.base=nf4"],
    "again": ["--adapter.base=nf4", "--adapter.targets=mlp/down"],
}
WORDS = "--prompt=abc", "--prompt=the d", "--max-tokens=8", "--json", "--devices=2"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    assert len(jax.devices()) == 8
    folder = tmp_path_factory.mktemp("several")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        text = f"--data={write_text(folder / 'text')}"
        for name in ("base", "other"):
            seed = f"--seed={len(name)}"
            assert main(["train", *BASE, f"--out={name}", text, "--steps=1", seed]) == 0
        for name, own in ADAPTERS.items():
            assert main(["train", *BASE, f"--out={name}", text, *LEARNS, *own]) == 0
        yield folder


def said(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["generate", *words]) == code
    out, err = capsys.readouterr()
    return err if code else [json.loads(line) for line in out.splitlines()]


@pytest.mark.slow
@pytest.mark.catches("adapters-of-one-scale")
@pytest.mark.parametrize(
    "names", [("low", "high", "wide"), ("low", "high"), ("coded", "again")], ids="-".join
)
def test_each_continues_prompts_as_if_it_were_alone(names, capsys):
    """In the same steps, but where one is DoRA."""
    alone = {name: said(capsys, name, *WORDS) for name in names}
    beside = said(capsys, "base", *(f"--adapter={name}" for name in names), *WORDS)
    assert beside == [{"adapter": name, **one} for name in names for one in alone[name]]
    assert len({json.dumps(one) for one in alone.values()}) == len(names)


@pytest.mark.slow
@pytest.mark.catches("base-held-twice")
def test_the_base_is_held_once():
    first = open_checkpoint("low").load(devices=jax.devices()[:2])
    other = open_checkpoint("wide").load(base=first)
    held = {id(x) for x in jax.tree.leaves(first.params)}
    infos, params = jax.tree.leaves(other.spec.infos), jax.tree.leaves(other.params)
    assert {id(x) in held for i, x in zip(infos, params, strict=True) if i.of_base} == {True}
    assert {id(x) in held for i, x in zip(infos, params, strict=True) if not i.of_base} == {False}
    plain = open_checkpoint("base").load(devices=jax.devices()[:2])
    held = {id(x) for x in jax.tree.leaves(open_checkpoint("low").load(base=plain).params)}
    assert {id(x) for x in jax.tree.leaves(plain.params)} <= held


@pytest.mark.slow
@pytest.mark.catches("beside-another-base")
@pytest.mark.catches("beside-codes-of-another-form")
def test_what_has_another_base_is_refused(capsys):
    plain = open_checkpoint("other").load(devices=jax.devices()[:1])
    with pytest.raises(CheckpointError, match="is an adapter of another base than '.*other"):
        open_checkpoint("low").load(base=plain)
    with pytest.raises(CheckpointError, match="holds a whole model and no adapter; load it apart"):
        open_checkpoint("base").load(base=plain)
    for words, message in (
        (["other", "--adapter=low"], "is an adapter of another base than"),
        (["low", "--adapter=high"], "'low' is an adapter itself; give its base as CHECKPOINT"),
        (["base", "--adapter=other"], "'other' holds a whole model; give it as CHECKPOINT"),
        (["base", "--adapter=low", "--adapter=coded"], "kept as nf4, and those that are loaded"),
        (["base", "--adapter=wide", "--weights=int8"], "it has lengths of columns (adapter.dora)"),
        (["base", "--adapter=coded", "--weights=int8"], "the adapters learned beside matrices"),
        (["base", "--adapter=a=low", "--adapter=a=high"], "two are called 'a'; give one another"),
    ):
        err = said(capsys, *words, *WORDS, code=2)
        last = err.splitlines()[-1]
        assert message in last and last.startswith("colossax: "), err
