"""pytest's side of the harness: parametrises ``@distributed`` tests, runs them and shows what each rank did."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.harness import DistributedTest, KnownFault, Symptom
from tests.rank_failures import DistributedFailure
from tests.rank_pool import RankPools

MARKERS = (
    "distributed(test): runs on every rank of a pool of processes; use tests.harness.distributed",
    "known_fault(symptoms): fails in a known way; use tests.harness.known_fault",
    "gpu: needs a GPU; skipped without one",
    "slow: takes minutes; skipped unless --run-slow is given",
)
_FILLED_IN_BY_RANK = ("rank",)
_POOLS = pytest.StashKey[RankPools]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("distributed")
    group.addoption("--run-slow", action="store_true", help="also run the tests marked slow")
    group.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order that SEED determines")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.stash[_POOLS] = RankPools()
    config.pluginmanager.register(DistributedCall(), "distributed-call")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_POOLS].end()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("distributed")
    if marker is not None:
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        sizes = _settings(marker).world_sizes
        metafunc.parametrize("world_size", sizes, ids=[f"{n}rank{'s' if n > 1 else ''}" for n in sizes])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_slow = pytest.mark.skip(reason="slow: give --run-slow to run it")
    skip_gpu = pytest.mark.skip(reason="gpu: this machine has none")
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--run-slow"):
            item.add_marker(skip_slow)
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(skip_gpu)
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    # Begin the ranks' imports while tests that need no ranks run.
    if not session.config.option.collectonly and any(i.get_closest_marker("distributed") for i in session.items):
        session.config.stash[_POOLS].start_template()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        marker = pyfuncitem.get_closest_marker("known_fault")
        if marker is not None:
            symptoms: tuple[Symptom, ...] = marker.args[0]
            if any(symptom.shown_by(error) for symptom in symptoms):
                raise KnownFault(str(error)) from error
        raise


class DistributedCall:
    """Runs the body of ``@distributed`` tests on the ranks. A plugin of its own: this module has that hook already."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> object:
        marker = pyfuncitem.get_closest_marker("distributed")
        if marker is None:
            return None
        settings = _settings(marker)
        names = pyfuncitem._fixtureinfo.argnames
        kwargs: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names if name not in _FILLED_IN_BY_RANK}
        pools = pyfuncitem.config.stash[_POOLS]
        pool = pools[cast(int, pyfuncitem.callspec.params["world_size"])]
        pool.run(pyfuncitem.obj, timeout_s=settings.timeout_s, mortal_ranks=settings.mortal_ranks, **kwargs)
        return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, DistributedFailure) and report.failed:
        # The pytest process's own stack leads through the harness; the ranks' tell what happened.
        report.longrepr = str(error)
    return report


@pytest.fixture
def rank_pools(pytestconfig: pytest.Config) -> RankPools:
    """The session's pools, for tests in the pytest process: ``rank_pools[2].run(function, ...)``."""
    return pytestconfig.stash[_POOLS]


@pytest.fixture
def shared_dir(tmp_path: Path) -> Path:
    """A folder that all ranks of this test see, empty at its start."""
    return tmp_path


@pytest.fixture
def rank() -> Iterator[Any]:
    """Stands in the signature of a ``@distributed`` test; each rank puts its own number there."""
    yield None


def _settings(marker: pytest.Mark) -> DistributedTest:
    settings: DistributedTest = marker.args[0]
    return settings


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
