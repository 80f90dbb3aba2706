"""A server of the toy engine in a process of its own; says its port when it answers."""

import resource
import sys
import threading
import time

from colossax.cli.output import put
from colossax.serve import ServeOptions, bound, serve
from colossax.serve.engine.supervisor import Supervisor


def main():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    options = ServeOptions(port=0)
    sock = bound(options)
    command = [sys.executable, "-m", "tests.serve.engine.toy", "none", "0", sys.argv[1]]
    backend = Supervisor(command)

    def say():
        while not backend.ready():
            time.sleep(0.05)
        put(f"{sock.getsockname()[1]}\n")
        sys.stdout.flush()

    threading.Thread(target=say, daemon=True).start()
    return serve(backend, options, sock)


if __name__ == "__main__":
    sys.exit(main())
