"""What codes of eight bits in the pages of an engine cost a model in perplexity, beside bytes.

    python bench/cache_formats.py CHECKPOINT [--text FILE] [--tokens 2048] [--out FILE]

Rows of a text go into pages in chunks, so that all but a chunk's own tokens are read as codes, and
each token is told the probability that the model gives it. FILE is by default `argparse.py` of the
standard library, which recipes may have trained on: what counts is the ratio to `own`. The bar is
1 % more perplexity.
"""

import argparse
import functools
import sys
from pathlib import Path

import common

sys.path.insert(0, str(common.REPOSITORY))

import jax
import jax.numpy as jnp
import numpy as np

from colossax.inference import open_checkpoint
from colossax.inference.engine.formats import FORMATS
from colossax.inference.engine.program import EngineProgram, Sizes
from colossax.inference.engine.sizing import cache_bytes
from colossax.nn import FlatTokens
from colossax.pallas.attention import Pages
from colossax.sharding import use

BAR = 0.01
PAGE, CHUNK = 16, 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "cache_formats.json")
    arguments = parser.parse_args()
    stored = open_checkpoint(arguments.checkpoint)
    model = stored.load(devices=jax.devices()[:1])
    ids = stored.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
    slots = stored.config.max_seq // CHUNK * CHUNK
    count = min(len(ids), arguments.tokens) // slots
    rows = np.asarray(ids[: count * slots], np.int32).reshape(count, slots)
    cases = [{"format": form, **measured(model, rows, form)} for form in FORMATS]
    for case in cases:
        case["more"] = case["perplexity"] / cases[0]["perplexity"] - 1
    result = {
        "benchmark": "cache_formats",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "tokens": int(rows.size),
        "bar": BAR,
        "cases": cases,
    }
    common.write_json(arguments.out, result)
    names = ["format", "perplexity", "more", "bytes_a_token"]
    print(common.table(names, [[case[name] for name in names] for case in cases]))
    if any(case["more"] > BAR for case in cases):
        sys.exit(f"more than {BAR:.0%} of perplexity is lost")


def measured(model, rows, form):
    """Perplexity of rows, and bytes of the cache for each of their tokens."""
    slots = rows.shape[1]
    sizes = Sizes(
        seats=1,
        pages=slots // PAGE,
        page_tokens=PAGE,
        slots=slots,
        mixed=CHUNK,
        decode=1,
        cache=form,
    )
    program = EngineProgram(model.spec, model.bound, sizes)

    @functools.partial(jax.jit, donate_argnums=1)
    def put(params, cache, ids, after, start):
        """Tokens into pages; the negative log-probability of each one's next."""
        at = jnp.arange(CHUNK, dtype=jnp.int32)
        pages = Pages(table=jnp.arange(slots // PAGE, dtype=jnp.int32)[None], groups=at[None])
        flat = FlatTokens(
            seat=jnp.zeros_like(at), position=start + at, slot=start + at, pages=pages
        )
        with use(program.bound):
            one = model.spec.merge(params)
            hidden, cache = one.decode(ids, cache, flat)
            told = jax.nn.log_softmax(one.logits(hidden).astype(jnp.float32))
        return -jnp.take_along_axis(told, after[:, None], axis=1)[:, 0], cache

    total, seen = 0.0, 0
    for row in rows:
        cache = program.cache.empty()
        for start in range(0, slots, CHUNK):
            after = np.append(row, 0)[start + 1 : start + CHUNK + 1]
            lost, cache = put(
                model.params, cache, row[start : start + CHUNK], after, np.int32(start)
            )
            known = min(CHUNK, slots - 1 - start)
            total, seen = total + float(lost[:known].sum()), seen + known
    return {
        "perplexity": float(np.exp(total / seen)),
        "bytes_a_token": cache_bytes(program) / slots,
    }


if __name__ == "__main__":
    main()
