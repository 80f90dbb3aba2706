"""Train and serve models larger than one device's memory, on whatever devices are there."""

from colossax.compat import require_supported_jax

require_supported_jax()

from colossax.config import Plan as Plan  # noqa: E402 (the check above must come first)
from colossax.config import preset as preset  # noqa: E402
from colossax.sharding import constrain as constrain  # noqa: E402
from colossax.sharding import linear as linear  # noqa: E402
from colossax.sharding import attention as attention  # noqa: E402
from colossax.sharding import use as use  # noqa: E402
from colossax.train import boost as boost  # noqa: E402

__version__ = "0.1.0"
