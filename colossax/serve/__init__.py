"""Models over HTTP, as OpenAI's clients speak it. No JAX: the engine is a `Backend`.

`bound` takes the port, `serve` serves a `Backend` until it is told to end. What the engine is asked
and says are `EngineRequest` and `Emitted` of `colossax.scheduling`; a `Constraint` of `Grammars`
says which tokens may come.
Needs the extra `serve`.
"""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

if TYPE_CHECKING:
    from .backend import Backend as Backend
    from .backend import EngineDown as EngineDown
    from .backend import EngineFailed as EngineFailed
    from .backend import EngineFull as EngineFull
    from .backend import Facts as Facts
    from .backend import Started as Started
    from .backend import Stats as Stats
    from .grammar import Constraint as Constraint
    from .grammar import Grammars as Grammars
    from .http.keys import Keys as Keys
    from .http.server import bound as bound
    from .http.server import serve as serve
    from .options import Limits as Limits
    from .options import ServeOptions as ServeOptions
    from .text import Telling as Telling
else:
    __getattr__, __dir__ = lazily(__name__)
