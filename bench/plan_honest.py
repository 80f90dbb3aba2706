"""Plans of random models, targets and budgets, compiled once more: none may be over its budget.

60 cases are drawn from seeds: a Llama, a GPT-2 or a mixture of small random sizes, 1 to 64 A100,
H100 or H200, a budget of 0.9 to 2.5 times what the smallest plan needs by formula. Each is planned,
and the plan that is named is compiled again, from its JSON. Of 12 cases the most rows of a device
that `largest_microbatch` finds are held against those that fit by doubling and halving; beside them
stands what the formula says, corrected by one program. Needs the extra `aot` and no GPU.

Cases that `--out` holds are not run again, so the script may be stopped and goes on. Ends with
status 1 where a plan is over its budget or a largest batch is off by more than one row.

    python bench/plan_honest.py [--out FILE]
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.REPOSITORY))  # the cases are a part of the tests

CASES, LARGEST = 60, 12


def main() -> int:
    """Run what is new, tell all, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "plan_honest.json")
    args = parser.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    from tests.aot.drawn import drawn, judged, largest

    facts = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {}
    facts["versions"] = common.versions()
    for seed in _interleaved():
        kind, run = ("largest", largest) if seed < 0 else ("plans", judged)
        number = ~seed if seed < 0 else seed
        known = facts.setdefault(kind, {})
        if str(number) in known:
            continue
        began = time.process_time()
        known[str(number)] = {**run(drawn(number)), "cpu_s": time.process_time() - began}
        common.write_json(args.out, facts)
        print(kind, json.dumps(known[str(number)]), flush=True)
        jax.clear_caches()
    return _told(facts)


def _interleaved() -> list[int]:
    """Seeds; those of the largest batches, of which there are fewer, as `~seed` among them."""
    every = CASES // LARGEST
    return [
        one
        for seed in range(CASES)
        for one in ([seed] if seed % every else [seed, ~(seed // every)])
    ]


def _told(facts: dict[str, Any]) -> int:
    plans, sizes = facts["plans"].values(), facts["largest"].values()
    named = [one for one in plans if "named" in one]
    over = [one for one in named if one["over"]]
    off = [abs(one["planner"] - one["bisected"]) for one in sizes]
    formulas = sum(abs(one["formula and a program"] - one["bisected"]) <= 1 for one in sizes)
    most = max(one["programs"] for one in sizes)
    print(
        f"{len(plans)} cases: {len(named)} plans named, {len(over)} over their budget,"
        f" {len(plans) - len(named)} refused; {len(off)} largest batches, off by {max(off)} rows"
        f" at most with {most} programs at most; by formula and one program {formulas} within a row"
    )
    return int(bool(over) or max(off) > 1)


if __name__ == "__main__":
    sys.exit(main())
