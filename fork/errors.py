"""The errors that building or checking the fork can end with. Each message is one line that names the remedy."""


class ForkError(Exception):
    """Something in the repository, the base release or the machine keeps the fork from being built."""


class ManifestError(ForkError, ValueError):
    """`[tool.fork]` in pyproject.toml is not what it must be."""


class BaseReleaseError(ForkError):
    """The base release cannot be had, or is not the one that is pinned."""


class TreeError(ForkError, OSError):
    """The source tree to build from cannot be written."""
