"""`colossax serve` on an encoder, asked by OpenAI's own client."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from colossax.cli import main
from colossax.data import Tokenizer
from colossax.inference import open_checkpoint
from tests.cli.test_serve import Server
from tests.models.test_embedding_files import FLAGS, KINDS, modules, write
from tests.models.test_parity import GOLDEN

pytestmark = pytest.mark.slow

VECTORS = load_file(GOLDEN / "embeddings.safetensors")
FIRST, LAST = 1, 2
"""What a text is framed by, as `[CLS]` and `[SEP]`."""


def tokenizer():
    """A word a number, as many as the golden model has tokens."""
    words = {"[UNK]": 0, "[CLS]": FIRST, "[SEP]": LAST} | {f"w{i}": i for i in range(3, 128)}
    backend = Backend(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", FIRST), ("[SEP]", LAST)]
    )
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    return backend


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Golden BERT with a tokenizer, as an encoder of words and as one of sentences."""
    folder = tmp_path_factory.mktemp("embeddings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        for name in ("words", "sentences"):
            made = folder / f"hf_{name}"
            made.mkdir()
            for file in ("config.json", "model.safetensors"):
                (made / file).write_bytes((GOLDEN / "bert" / file).read_bytes())
            tokenizer().save(str(made / "tokenizer.json"))
            if name == "sentences":
                write(made, modules=modules(*KINDS), pooling=FLAGS)
            assert main(["import", str(made), name]) == 0
        yield folder


def golden(model="bert", pool="mean"):
    """Texts as token ids, and what `transformers` makes of them."""
    rows = zip(VECTORS[f"{model}/ids"], VECTORS["lengths"], strict=True)
    return [ids[:length].tolist() for ids, length in rows], VECTORS[f"{model}/{pool}"]


@pytest.mark.catches("text-without-its-frame")
def test_texts_are_framed_as_their_tokenizer_says():
    found = Tokenizer(definition=tokenizer().to_str(), end="[SEP]")
    assert found.encode_framed("w5 what w6") == [FIRST, 5, 0, 6, LAST]
    assert found.encode("w5 what w6") == [5, 0, 6]


@pytest.mark.parametrize(("name", "options"), [("sentences", {}), ("words", {"pool": "mean"})])
def test_what_transformers_gives(name, options):
    stored = open_checkpoint(name)
    stored = stored.embedding(**options) if options else stored
    texts, want = golden()
    found = stored.load(unroll=True).embedder(tokens=64).embed(texts)
    np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.slow
def test_what_the_page_does_from_python():
    page = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text(encoding="utf-8")
    scripts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (script,) = (one for one in scripts if "embedder" in one)
    scope = {}
    exec(script.replace("runs/mine", "words"), scope)
    assert scope["vectors"].shape == (2, 32)


@pytest.mark.slow
def test_what_a_client_is_told():
    """Vectors of `transformers`, of ids and of texts, shorter ones, and over an engine's death."""
    import openai

    texts, want = golden()
    with Server("--devices=2", "--mixed-tokens=64", checkpoint="sentences") as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any")
        told = client.embeddings.create(model="sentences", input=texts)
        np.testing.assert_allclose([one.embedding for one in told.data], want, atol=1e-5)
        assert told.usage.prompt_tokens == sum(map(len, texts))
        framed = client.embeddings.create(model="sentences", input=[[FIRST, 5, 9, LAST]])
        words = client.embeddings.create(model="sentences", input="w5 w9", encoding_format="float")
        np.testing.assert_allclose(words.data[0].embedding, framed.data[0].embedding, atol=1e-6)
        short = client.embeddings.create(model="sentences", input=texts, dimensions=8)
        kept = want[:, :8] / np.linalg.norm(want[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose([one.embedding for one in short.data], kept, atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="tells embeddings and continues no text"):
            client.completions.create(model="sentences", prompt="w5")
        with pytest.raises(openai.BadRequestError, match="input: has 65 tokens; at most 64 are"):
            client.embeddings.create(model="sentences", input=[5] * 65)
        os.kill(server.engine, signal.SIGKILL)
        again = client.with_options(max_retries=50).embeddings.create(
            model="sentences", input=texts
        )
        # Who shares a row is a matter of when they come, and rounds the last digit.
        found = [[one.embedding for one in each.data] for each in (again, told)]
        np.testing.assert_allclose(*found, atol=1e-6)
        assert server.end() == 0
        assert "Traceback" not in server.process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["words"], "its files do not say what a text's vector is; give --pool mean, or first"),
        (["words", "--pool=max"], "pool: 'max' is unknown"),
        (["sentences", "--no-normalise"], "--no-normalise: needs --pool"),
        (["sentences", "--pages=9"], "--pages: the model tells embeddings, which have neither"),
        (["sentences", "--host-pages=9"], "--host-pages: the model tells embeddings, which have"),
        (["sentences", "--draft=ngrams"], "--draft: the model tells embeddings"),
        (["sentences", "--cache=int8"], "--cache: the model tells embeddings"),
    ],
)
def test_refusals(words, message, capfd):
    assert main(["serve", "--port=0", *words]) == 2
    err = capfd.readouterr().err
    assert message in err and "Traceback" not in err
