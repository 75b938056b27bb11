"""ZeRO's public names: the base's, with the fork's `Init` and `GatheredParameters`."""

from ._base___init__ import *  # noqa: F401,F403
from .guard import Init  # noqa: F401
from .shared_updates import GatheredParameters  # noqa: F401
