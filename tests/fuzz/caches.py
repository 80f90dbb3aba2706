"""Damage to caches: they are built anew, and nothing else comes of it; a refusal is a fault."""

import hashlib
import random
from pathlib import Path

from colossax.data import encode_corpus, path_documents, train_tokenizer
from tests.fuzz import base as truth
from tests.fuzz.base import Base
from tests.fuzz.damage import damaged
from tests.fuzz.judge import Outcome, Verdict, called, commanded, judged, wrong

Case = tuple[str, Verdict]
_CACHES = ("corpora", "hashes", "tokenizers")


def of_corpus(base: Base, rng: random.Random, place: Path) -> Case:
    """The tokenizer and all tokens, as the data room reads them."""

    def good(done: Outcome) -> Verdict:
        base.use_own_cache()
        if done.value != corpus_digest(base.text):
            return wrong("other tokens")
        return Verdict(name="rebuilt")

    what = _harmed(base, rng, place)
    return what, _needed(what, judged(called(lambda: corpus_digest(base.text)), good=good))


def of_resume(base: Base, rng: random.Random, place: Path) -> Case:
    """A run that goes on over it has the losses it would have had."""

    def good(done: Outcome) -> Verdict:
        if done.value != 0 or truth.rows(place / "run") != base.losses:
            return wrong(f"exit code {done.value}, or other losses: {done.said[-800:]}")
        return Verdict(name="rebuilt")

    base.copy(place)
    what = _harmed(base, rng, place)
    return what, _needed(what, judged(commanded(*truth.resuming(place / "run")), good=good))


def corpus_digest(text: Path) -> str:
    """Of all that is made of a text."""
    documents = path_documents(text)
    tokenizer = train_tokenizer(documents, 300)
    corpus = encode_corpus(documents, tokenizer)
    found = hashlib.blake2b(tokenizer.to_json().encode())
    for array in (corpus.tokens[0 : len(corpus.tokens)], corpus.offsets, corpus.hashes):
        found.update(array.tobytes())
    found.update(corpus.counts.tobytes())
    return found.hexdigest()


def _needed(what: str, verdict: Verdict) -> Verdict:
    if verdict.name == "refused" and ".lock" not in what:
        return wrong(f"a cache is in the way: {verdict.why}")
    return verdict


def _harmed(base: Base, rng: random.Random, place: Path) -> str:
    cache = base.copy_cache(place)
    said = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        files = sorted(p for p in cache.rglob("*") if p.is_file() and not p.is_symlink())
        files = [p for p in files if p.relative_to(cache).parts[0] in _CACHES]
        if not files:
            break
        chosen = rng.choice(files)
        said.append(f"{chosen.relative_to(cache)}: {damaged(chosen, rng, files)}")
    return "; ".join(said)
