"""The builder of GPUDirect Storage: DeepSpeed's sources, with the libaio parts. Not run on the fork's machines."""

from .builder import CUDAOpBuilder
from .pin_memory import PinnedTensorManager

_AIO_SOURCES = (
    "py_lib/deepspeed_py_io_handle",
    "py_lib/deepspeed_py_aio",
    "py_lib/deepspeed_py_aio_handle",
    "py_lib/deepspeed_aio_thread",
    "py_lib/deepspeed_cpu_op",
    "py_lib/deepspeed_aio_op_desc",
    "py_lib/deepspeed_py_copy",
    "py_lib/deepspeed_pin_tensor_client",
    "common/deepspeed_aio_utils",
    "common/deepspeed_aio_common",
    "common/deepspeed_aio_types",
)
_GDS_SOURCES = ("deepspeed_py_gds_handle", "deepspeed_gds_op", "py_ds_gds")


class GDSBuilder(CUDAOpBuilder):
    BUILD_VAR = "DS_BUILD_GDS"
    NAME = "gds"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"deepspeed.ops.gds.{self.NAME}_op"

    def sources(self):
        aio = [f"csrc/aio/{name}.cpp" for name in _AIO_SOURCES]
        return aio + [f"csrc/gds/py_lib/{name}.cpp" for name in _GDS_SOURCES]

    def include_paths(self):
        return ["csrc/aio/py_lib", "csrc/aio/common", "csrc/pin_memory", f"{_cuda_home()}/include"]

    def cxx_args(self):
        return [*super().cxx_args(), self.cpu_arch(), self.simd_width(), "-fopenmp", "-Wall", "-Wno-reorder", "-fPIC"]

    def extra_ldflags(self):
        home = _cuda_home()
        return [f"-L{home}", f"-L{home}/lib64", "-laio", "-lcuda", "-lcudart", "-lcufile"]

    def load(self, verbose=False):
        # It looks for the manager among the process's symbols. Under another name than that of the fork's own op.
        PinnedTensorManager("pin_memory_manager").load(verbose=verbose)
        return super().load(verbose=verbose)

    def is_compatible(self, verbose=False):
        if self.is_rocm_pytorch() or _cuda_home() is None:
            if verbose:
                self.warning(f"{self.NAME} needs torch with CUDA, and the CUDA toolkit")
            return False
        folders = (_cuda_home(), f"{_cuda_home()}/lib64")
        for function, library in (("cuFileDriverOpen", "cufile"), ("io_submit", "aio")):
            if not self.has_function(function, (library,), library_dirs=folders, verbose=verbose):
                if verbose:
                    self.warning(f"{self.NAME} needs lib{library} and its headers")
                return False
        return super().is_compatible(verbose)


def _cuda_home():
    try:
        from torch.utils.cpp_extension import CUDA_HOME
    except ImportError:
        return None
    return CUDA_HOME
