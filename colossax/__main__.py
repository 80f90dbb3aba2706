"""`python -m colossax`."""

import sys

from colossax.cli import main

if __name__ == "__main__":
    sys.exit(main())
