"""The builder of an op that is one library, with the interface that accelerators, `ds_report` and setup.py use."""

from .builder import OpBuilder
from .native import NativeLibrary


class NativeOp(OpBuilder):
    """Give a subclass `LIBRARY`, `NAME` and `BUILD_VAR`. Not a name in ...Builder: those are collected as ops."""

    LIBRARY: NativeLibrary

    def __init__(self):
        super().__init__(self.LIBRARY.name)

    def wrap(self, path):
        """What Python code gets for the library at ``path``."""
        raise NotImplementedError

    def absolute_name(self):
        return self.LIBRARY.module

    def sources(self):
        return list(self.LIBRARY.sources)

    def is_compatible(self, verbose=False):
        if self.LIBRARY.is_available():
            return True
        if verbose:
            self.warning(f"{self.name} needs Linux, and a C++ compiler (g++, or one named in CXX) to be built with")
        return False

    def builder(self):
        return self.LIBRARY.extension()

    def load(self, verbose=False):
        """The op, compiled now if need be; the same object for all of a process."""
        if self.name not in OpBuilder._loaded_ops:
            OpBuilder._loaded_ops[self.name] = self.wrap(self.LIBRARY.path())
        return OpBuilder._loaded_ops[self.name]
