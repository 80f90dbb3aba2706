"""Adapters by name: served and generated beside one base, each as if it were alone."""

import dataclasses
import json
import os
import signal
import time

import jax
import pytest

from colossax.cli import main
from colossax.nn import AdapterConfig
from tests.cli.test_serve import Server
from tests.inference.beside import made
from tests.serve.fake import TOKENIZER, VOCAB

pytestmark = pytest.mark.slow

CONFIG = dataclasses.replace(made.CONFIG, vocab=VOCAB, layers=2)
ADAPTERS = {
    "low": AdapterConfig(rank=2, targets="attn/*"),
    "wide": AdapterConfig(rank=4, targets="mlp/*,head"),
}
WORDS = "--prompt=the d", "--max-tokens=16", "--json", "--devices=1"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    assert len(jax.devices()) == 8  # before --devices asks for fewer
    folder = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        more = {"tokenizer": TOKENIZER.to_json()}
        base = made.base(folder / "mine", CONFIG, **more)
        for seed, (name, config) in enumerate(ADAPTERS.items(), 1):
            made.adapter(folder / name, base, config, seed, **more)
        yield folder


def generated(capsys, *words):
    """What `generate` says, by adapter."""
    capsys.readouterr()
    assert main(["generate", *words, *WORDS]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {one.get("adapter"): one["text"] for one in lines}


@pytest.mark.slow
@pytest.mark.catches("adapter-steps-of-now")
def test_adapters_by_name(folder, capsys):
    """Of `generate` and of a server, also when its engine was started again."""
    wanted = {"mine": generated(capsys, "mine")[None]}
    told = generated(capsys, "mine", "--adapter=low", "--adapter=odd=wide")
    assert told == {"low": generated(capsys, "low")[None], "odd": generated(capsys, "wide")[None]}
    wanted |= {f"mine:{name}": text for name, text in told.items()}
    assert len(set(wanted.values())) == 3
    words = "--devices=1", "--seats=4", "--slots=64", "--adapter=low", "--adapter=odd=wide"
    with Server(*words) as server:
        assert says(server, wanted) == wanted
        # A later step of an adapter is not for an engine that is started again.
        base = made.open_checkpoint("mine")
        made.adapter(folder / "low", base, ADAPTERS["low"], 7, step=2)
        os.kill(server.engine, signal.SIGKILL)
        assert says(server, wanted) == wanted
        assert server.end() == 0


def says(server, names):
    """What the server says under each name, which are all that it has."""
    import openai

    found = {}
    asked = {"prompt": "the d", "max_tokens": 16, "temperature": 0}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any") as client:
        assert [model.id for model in client.models.list()] == list(names)
        for name in names:
            while name not in found:
                try:
                    found[name] = client.completions.create(model=name, **asked).choices[0].text
                except openai.InternalServerError:  # 503 while an engine starts
                    time.sleep(0.2)
        with pytest.raises(openai.NotFoundError, match="mine:none"):
            client.completions.create(model="mine:none", prompt="a")
    return found
