"""A process that makes processes to be killed: `python -m tests.offload.disk.children FILE`.

For each line it reads it makes a child that updates the store without end. A fork of one process
that has imported everything starts in a millisecond, where a new interpreter takes seconds.
"""

import itertools
import os
import sys
import time

from colossax.offload.disk.file import BlockFile
from tests.offload.disk.support import open_store, step


def update_forever(path):
    """Epoch after epoch; says what is written and which epoch is committed."""
    write = BlockFile.write

    def told(*args):
        write(*args)
        os.write(1, b"write\n")
        time.sleep(0.001)  # so that a kill comes before the next

    BlockFile.write = told
    with open_store(path) as store:
        begin = store.consistent_epoch()
        os.write(1, f"open {os.getpid()}\n".encode())
        for epoch in itertools.count(begin):
            step(store, epoch)
            os.write(1, f"{epoch + 1}\n".encode())


def main():
    """Until there is no line left."""
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            try:
                update_forever(sys.argv[1])
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    main()
