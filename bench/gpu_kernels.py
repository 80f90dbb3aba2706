"""Speed of the kernels on one GPU, beside cuDNN, a matmul and a copy of the same run.

What `colossax bench kernels` measures, each kind of kernel in a process of its own, so that one
that hangs or fails leaves the others; kept in results/gpu_kernels.json after each of them and,
while one runs, row by row beside it. A part that is measured anew replaces itself. On a CPU shapes
are smaller, and nothing is written unless `--out` says so.

    python bench/gpu_kernels.py [--kinds KIND ... | --few] [--out FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

KINDS = (
    "grouped",
    "attention forward",
    "attention backward",
    "ring step",
    "paged decode",
    "paged heavy",
    "int4 matmul",
    "2:4 matmul",
    "1:4 matmul",
)
CHOSEN = (
    "grouped forward 16384 x 4096 x 2048, 8 Zipf groups",
    "grouped dx 16384 x 4096 x 2048, 8 Zipf groups",
    "grouped dw 16384 x 4096 x 2048, 8 Zipf groups",
    "1 x 16384, 16 of 128, causal",
    "1 x 8192, 32/8 of 128, causal",
    "4 x 4096, 32 of 64, causal",
    "1 x 32768, 16 of 128, causal 16 documents",
    "ring step 1 x 8192",
    "paged decode 64 x 2048",
    "int4 matmul 32 x 4096",
    "2:4 matmul 32 x 4096",
    "1:4 matmul 32 x 4096",
)
"""What `--few` measures, in one process: where minutes of a GPU are few."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--few", action="store_true", help="a few cases, in one process")
    parser.add_argument("--out", type=Path, help="default on a GPU: results/gpu_kernels.json")
    arguments = parser.parse_args()
    hardware = common.hardware()
    out = arguments.out
    if out is None and "gpu" in hardware:
        out = common.HERE / "results" / "gpu_kernels.json"
    result: dict[str, Any] = {"benchmark": "gpu_kernels", "kinds": {}}
    if out is not None and out.exists():
        result = json.loads(out.read_text())
    result |= {"hardware": hardware, "versions": common.versions()}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"few": CHOSEN} if arguments.few else {kind: (kind,) for kind in arguments.kinds}
        for kind, texts in kinds.items():
            part = (out.parent if out else Path(folder)) / f"{kind.replace(' ', '_')}.part.json"
            code = _measure(texts, part, folder)
            failed += code != 0
            found = json.loads(part.read_text()) if part.exists() else {}
            result["kinds"][kind] = {"exit_code": code, **found}
            if out is not None:
                common.write_json(out, result)
            part.unlink(missing_ok=True)
    return 1 if failed else 0


def _measure(texts: Sequence[str], part: Path, cache: str) -> int:
    words = ["-m", "colossax", "bench", "kernels", "--out", str(part)]
    words += [word for text in texts for word in ("--only", text)]
    paths = [str(common.REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["JAX_COMPILATION_CACHE_DIR"] = cache
    return subprocess.run([sys.executable, *words], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
