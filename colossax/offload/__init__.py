"""Host memory as a second tier: what measured rates say about moving and updating states there."""

from .cpu_update import cpu_rows as cpu_rows
from .cpu_update import split_update as split_update
from .rates import Rates as Rates
from .rates import Setting as Setting
from .rates import Update as Update
from .rates import UpdateRate as UpdateRate
from .rates import load_rates as load_rates
from .rates import measure_rates as measure_rates
from .rates import rates_path as rates_path
from .rates import save_rates as save_rates
from .share import balanced_share as balanced_share
from .share import cpu_share as cpu_share
from .share import hiding_tokens as hiding_tokens
from .share import update_seconds as update_seconds
