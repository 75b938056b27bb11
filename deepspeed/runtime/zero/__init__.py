"""ZeRO's public names: the base's, with the fork's `Init`."""

from ._base___init__ import *  # noqa: F401,F403
from .guard import Init  # noqa: F401
