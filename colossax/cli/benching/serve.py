"""`colossax bench serve`."""

import argparse
import asyncio
import json
import math
from typing import Any

from colossax.cli.output import put
from colossax.errors import InputError
from colossax.files import write_whole


def run(args: argparse.Namespace) -> int:
    """Measure the server, print a table, and return the exit code: 1 where requests failed."""
    from colossax.serve.measuring import Bounds, Load, measured, summary

    if args.recipe is None:
        raise InputError(
            "URL: it is missing; give that of a server, as http://127.0.0.1:8000, which `colossax"
            " serve` prints"
        )
    load = Load(
        requests=args.requests,
        rate=args.rate,
        longest=args.longest,
        lengths=args.lengths,
        cancelled=args.cancelled,
        seed=args.seed,
    )
    bounds = Bounds(first_s=args.first_s, between_s=args.between_s)
    url = args.recipe.rstrip("/").removesuffix("/v1")
    asked = asyncio.run(measured(url, load, key=args.key))
    found = summary(asked, bounds)
    document = {name: None if value != value else value for name, value in found.items()}
    if args.out is not None:
        write_whole(args.out, json.dumps(document, indent=1) + "\n")
    put(json.dumps(document) + "\n" if args.json else _table(found, load, bounds))
    return 1 if found["failed"] else 0


def _table(found: dict[str, Any], load: Any, bounds: Any) -> str:
    lines = [
        f"{found['heard']} of {found['requests']} requests heard in {found['wall_s']:.1f} s, at"
        f" {load.rate:g} a second on average; {found['given_up']} given up halfway",
        f"{found['said_tokens_per_s']:,.0f} tokens/s said, {found['prompt_tokens']:,} read",
        f"good: {found['goodput_per_s']:.2f} requests/s, {100 * found['good_share']:.1f} % of those"
        f" that stayed (first token within {bounds.first_s:g} s, each further one within"
        f" {bounds.between_s:g} s on average)",
        f"{'seconds':18}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name in ("first_token_s", "between_tokens_s", "request_s"):
        row = [found[name].get(share, math.nan) for share in ("p50", "p90", "p99")]
        what = name.removesuffix("_s").replace("_", " ")
        lines.append(f"{what:18}" + "".join(f"{value:10.4f}" for value in row))
    for status, count in found["failed"].items():
        how = "the connection broke" if status == "0" else f"status {status}"
        lines.append(f"failed: {count} ({how})")
    return "\n".join(lines) + "\n"
