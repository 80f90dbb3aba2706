"""The processes of a run: how they meet, and what they agree on."""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

if TYPE_CHECKING:
    from .agreement import Gate as Gate
    from .agreement import StopAgreement as StopAgreement
    from .group import Group as Group
    from .group import join as join
    from .launch import Launch as Launch
    from .launch import find_launch as find_launch
    from .launch import start_jax as start_jax
    from .signals import EXIT_CODES as EXIT_CODES
    from .signals import StopSignals as StopSignals
    from .signals import heeded as heeded
else:
    __getattr__, __dir__ = lazily(__name__)
