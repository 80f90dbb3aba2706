"""`python -m colossax.pallas.proof REQUEST RESULTS`; see `child.serve`."""

import sys
from pathlib import Path

from .child import serve

if __name__ == "__main__":
    serve(*map(Path, sys.argv[1:]))
