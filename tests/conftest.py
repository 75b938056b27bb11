"""Makes the harness's hooks and fixtures part of every test run."""

from tests.distributed_plugin import (  # noqa: F401
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
    pytest_pyfunc_call,
    pytest_runtest_makereport,
    pytest_unconfigure,
    rank,
    rank_pools,
    shared_dir,
)
