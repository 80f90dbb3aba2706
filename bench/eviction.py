"""What letting go of tokens costs a model in perplexity: those looked at most, or the first, kept.

    python bench/eviction.py CHECKPOINT [--text FILE] [--tokens 2048] [--pages 2 4 8] [--out FILE]

Rows of a text, as long as the model's longest sequence, go into the pages of an engine; each token
is told the probability that the model gives it. Of each budget, in pages, half is for heavy hitters
and half for the window beside them; of the first tokens one page is kept, and the rest is window;
a window alone is told too, and half of it. FILE is by default `argparse.py` of the standard
library, which recipes may have trained on: what counts is the ratio to keeping all. There is no
bar: which tokens a model can do without depends on the model.
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
from colossax.inference.engine.program import EngineProgram, Sizes
from colossax.nn import FlatTokens
from colossax.pallas.attention import Heavy, Kept, Pages
from colossax.scheduling import Keep
from colossax.sharding import use

PAGE = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "eviction.json")
    arguments = parser.parse_args()
    stored = open_checkpoint(arguments.checkpoint)
    model = stored.load(devices=jax.devices()[:1])
    ids = stored.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
    slots = stored.config.max_seq // PAGE * PAGE
    count = min(len(ids), arguments.tokens) // slots
    if not count or min(arguments.pages) < 2:
        sys.exit(f"give --tokens {slots} or more, a text as long, and --pages from 2 on")
    rows = np.asarray(ids[: count * slots], np.int32).reshape(count, slots)
    asked: list[Keep | None] = [None]
    for pages in arguments.pages:
        half = pages // 2 * PAGE
        asked += [
            Keep(heavy=pages * PAGE - half, window=half),
            Keep(sinks=PAGE, window=(pages - 1) * PAGE),
            Keep(sinks=0, window=pages * PAGE),
            Keep(sinks=0, window=half),
        ]
    cases = [{"keep": keep and keep.named, **measured(model, rows, keep)} for keep in asked]
    for case in cases:
        case["more"] = case["perplexity"] / cases[0]["perplexity"] - 1
    result = {
        "benchmark": "eviction",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "row": slots,
        "tokens": int(rows.size),
        "cases": cases,
    }
    common.write_json(arguments.out, result)
    names = ["keep", "perplexity", "more"]
    print(common.table(names, [[str(case[name]) for name in names] for case in cases]))


def measured(model, rows, keep):
    """Perplexity of rows, of all their tokens."""
    slots, chunk = rows.shape[1], PAGE
    kind = None if keep is None else keep.kind
    sizes = Sizes(
        seats=1,
        pages=slots // PAGE,
        page_tokens=PAGE,
        slots=slots,
        mixed=chunk,
        decode=1,
        keeps=kind,
    )
    program = EngineProgram(model.spec, model.bound, sizes)
    kept = None if keep is None else keep.pages(PAGE, chunk)

    @functools.partial(jax.jit, donate_argnums=1)
    def put(params, cache, ids, after, start):
        """Tokens into pages; the negative log-probability of each one's next."""
        at = jnp.arange(chunk, dtype=jnp.int32)
        seat, position = jnp.zeros_like(at), start + at
        given, closer = {}, None
        if kept is not None:
            front, window, ring = (jnp.full(1, x, jnp.int32) for x in kept)
            if kind == "heavy":
                given["heavy"] = Heavy.of(front, window, seat, position, PAGE)
            else:
                given["kept"] = Kept(sinks=front, window=window, ring=ring, page_tokens=PAGE)
                closer = given["kept"].closer(seat, position)
        table = jnp.arange(slots // PAGE, dtype=jnp.int32)[None]
        pages = Pages(table=table, groups=at[None], **given)
        flat = FlatTokens(seat=seat, position=position, slot=position, pages=pages, closer=closer)
        with use(program.bound):
            one = model.spec.merge(params)
            hidden, cache = one.decode(ids, cache, flat)
            told = jax.nn.log_softmax(one.logits(hidden).astype(jnp.float32))
        return -jnp.take_along_axis(told, after[:, None], axis=1)[:, 0], cache

    lost = []
    for row in rows:
        cache, of_row = program.cache.empty(), []
        for start in range(0, slots, chunk):
            after = np.append(row, 0)[start + 1 : start + chunk + 1]
            part = row[start : start + chunk]
            found, cache = put(model.params, cache, part, after, np.int32(start))
            of_row.append(np.asarray(found, np.float64))
        lost.append(np.concatenate(of_row)[:-1])
    return {"perplexity": float(np.exp(np.mean(lost)))}


if __name__ == "__main__":
    main()
