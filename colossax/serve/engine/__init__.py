"""An engine in a process of its own, and the server's end of it."""

from .child import alone as alone
from .child import run as run
from .embedding import run_embedder as run_embedder
from .journal import Journal as Journal
from .supervisor import Supervisor as Supervisor
from .wire import Wire as Wire
