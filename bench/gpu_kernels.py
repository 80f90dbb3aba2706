"""Speed of the kernels on one GPU, beside cuDNN, a matmul and a copy of the same run.

What `colossax bench kernels` measures, kept in results/gpu_kernels.json; written after every row,
so a run cut short keeps what it had. Under ten minutes on one GPU; `--only` takes a part.
Elsewhere it measures what is there, with smaller shapes, and writes nothing unless `--out` says so.

    python bench/gpu_kernels.py [--only TEXT] [--out FILE]
"""

import sys

import common


def main() -> int:
    sys.path.insert(0, str(common.REPOSITORY))
    import jax

    from colossax.cli import main as colossax

    words = sys.argv[1:]
    if jax.default_backend() == "gpu" and not any(word.startswith("--out") for word in words):
        words += ["--out", str(common.HERE / "results" / "gpu_kernels.json")]
    return colossax(["bench", "kernels", *words])


if __name__ == "__main__":
    sys.exit(main())
