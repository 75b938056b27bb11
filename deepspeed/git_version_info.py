"""The version of this installation, as the base tells it, and of the fork that it is.

`deepspeed/__init__.py` of the base imports this module, which makes it the place where `deepspeed.fork_info` is set.
"""

from . import fork_info
from ._base_git_version_info import *  # noqa: F401,F403

fork_info.announce()
