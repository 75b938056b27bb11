"""The harness tells what happened on every rank, goes on afterwards, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import rank_pool, shared_segments
from tests.fault import rank_functions
from tests.harness import (
    PoolReplaced,
    RankDied,
    RankExit,
    RankPools,
    RankRaised,
    RankTimeout,
    distributed,
)

pytest_plugins = ["pytester"]
REPOSITORY_DIR = Path(__file__).resolve().parents[2]
HOME = os.environ["HOME"]
"""pytester gives each test an empty one, but compiled ops are cached below it."""
TIMEOUT_S = 30.0
HANG_TIMEOUT_S = 1.0


@pytest.fixture(autouse=True)
def _unasked_for_replacements_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PoolReplaced)
        yield


def assert_works(pools: RankPools, world_size: int) -> None:
    expected = float(sum(range(world_size)))
    assert pools[world_size].run(rank_functions.sum_of_ranks, timeout_s=TIMEOUT_S) == [expected] * world_size


def wait_until_ended(pid: int) -> bool:
    """Whether the process, which need not be a child, has ended within the time limit."""
    try:
        process_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process_fd], [], [], TIMEOUT_S)[0])
    finally:
        os.close(process_fd)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_runs_on_every_rank_and_returns_each_value(rank_pools: RankPools, world_size: int) -> None:
    pool = rank_pools[world_size]
    assert pool.run(rank_functions.add_rank, 10, b=5) == [15 + rank for rank in range(world_size)]
    assert pool.run(rank_functions.rank_given_by_name) == list(range(world_size))
    assert_works(rank_pools, world_size)


def test_pool_is_reused(rank_pools: RankPools) -> None:
    pids = rank_pools[2].pids
    assert_works(rank_pools, 2)
    assert_works(rank_pools, 2)
    assert rank_pools[2].pids == pids


def test_one_rank_raises_while_others_wait(rank_pools: RankPools) -> None:
    pids = rank_pools[2].pids
    with pytest.raises(RankRaised) as caught:
        rank_pools[2].run(rank_functions.fail_assertion_on, failing_rank=1, timeout_s=TIMEOUT_S)
    text = str(caught.value)
    assert isinstance(caught.value, AssertionError)
    assert caught.value.summary == "rank 1 of 2 raised"
    assert "assert 42 == 54" in text
    waiting, raised = caught.value.reports
    assert waiting.state == "was still running"
    assert "wait_for_peers" in waiting.stacks
    assert "fail_assertion_on" in raised.traceback_text
    assert (raised.stdout, raised.stderr) == ("output of rank 1\n", "errors of rank 1\n")
    assert rank_pools[2].pids != pids
    assert_works(rank_pools, 2)


def test_all_ranks_raise_and_the_pool_is_kept(rank_pools: RankPools) -> None:
    pids = rank_pools[2].pids
    with pytest.raises(rank_functions.CustomError, match="rank 0, 1 of 2 raised") as caught:
        rank_pools[2].run(rank_functions.raise_custom_error, timeout_s=TIMEOUT_S)
    assert isinstance(caught.value, RankRaised)
    for report in caught.value.reports:
        assert f"CustomError: from rank {report.rank}" in report.traceback_text
    assert_works(rank_pools, 2)
    assert rank_pools[2].pids == pids


def test_ranks_raise_different_types(rank_pools: RankPools) -> None:
    with pytest.raises(RankRaised) as caught:
        rank_pools[2].run(rank_functions.raise_different_types, timeout_s=TIMEOUT_S)
    assert not isinstance(caught.value, KeyError | ZeroDivisionError)
    assert "KeyError: 'zero'" in str(caught.value)
    assert "ZeroDivisionError: one" in str(caught.value)


def test_hang_shows_every_stack_and_ends_only_its_pool(rank_pools: RankPools) -> None:
    other_pids = rank_pools[1].pids
    pids = rank_pools[2].pids
    with pytest.raises(RankTimeout, match="rank 0, 1 of 2 did not finish within 1 s") as caught:
        rank_pools[2].run(rank_functions.hang_on, 1, timeout_s=HANG_TIMEOUT_S)
    waiting, spinning = caught.value.reports
    assert "wait_for_peers" in waiting.stacks
    assert "spin_for_ever" in spinning.stacks
    assert all(wait_until_ended(pid) for pid in pids)
    assert rank_pools[1].pids == other_pids
    assert_works(rank_pools, 1)
    assert_works(rank_pools, 2)


def test_exit_is_noticed_at_once(rank_pools: RankPools) -> None:
    pool = rank_pools[2]
    started_s = time.monotonic()
    with pytest.raises(RankDied, match="rank 1 ended with exit status 3 during the run on 2 ranks") as caught:
        pool.run(rank_functions.exit_on, 1, 3, timeout_s=TIMEOUT_S)
    assert time.monotonic() - started_s < TIMEOUT_S / 2
    assert "last words" in caught.value.reports[1].stderr
    assert_works(rank_pools, 2)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT], ids=lambda s: s.name)
def test_death_by_signal_is_named(rank_pools: RankPools, signal_number: signal.Signals) -> None:
    pool = rank_pools[2]
    with pytest.raises(RankDied, match=rf"rank 0 ended by signal {signal_number:d} \({signal_number.name}\)") as caught:
        pool.run(rank_functions.kill_on, 0, signal_number, timeout_s=TIMEOUT_S)
    if signal_number != signal.SIGKILL:
        assert "kill_on" in caught.value.reports[0].stderr
    assert_works(rank_pools, 2)


def test_mortal_rank_may_end(rank_pools: RankPools) -> None:
    results = rank_pools[2].run(rank_functions.exit_quietly_on, 1, mortal_ranks=[1], timeout_s=TIMEOUT_S)
    assert results == ["done", RankExit(0)]
    assert_works(rank_pools, 2)


def test_skip_xfail_and_importorskip_reach_pytest(rank_pools: RankPools) -> None:
    pool = rank_pools[2]
    with pytest.raises(pytest.skip.Exception, match="no such thing here"):
        pool.run(rank_functions.skip)
    with pytest.raises(pytest.skip.Exception, match="no_such_module_anywhere"):
        pool.run(rank_functions.skip_without_module)
    with pytest.raises(pytest.xfail.Exception, match="not yet"):
        pool.run(rank_functions.xfail)
    with pytest.raises(RankRaised, match="the ranks disagree"):
        pool.run(rank_functions.skip, 0)


def test_values_that_cannot_travel_are_named(rank_pools: RankPools) -> None:
    pool = rank_pools[1]
    with pytest.raises(ValueError, match="arguments of add_rank cannot be sent"):
        pool.run(rank_functions.add_rank, lambda: None, b=1)
    with pytest.raises(ValueError, match="at the top level"):
        pool.run(lambda: None)
    with pytest.raises(RankRaised, match="return_unpicklable returned a function, which cannot be sent"):
        pool.run(rank_functions.return_unpicklable)
    assert_works(rank_pools, 1)


def test_left_segments_are_removed_and_foreign_ones_kept(rank_pools: RankPools) -> None:
    name = f"harness-test-{uuid.uuid4().hex}"
    foreign = Path(f"/dev/shm/{name}-foreign")
    pool = rank_pools[2]
    foreign.write_bytes(b"x")
    try:
        pool.run(rank_functions.leave_segments, name)
        assert [s for s in shared_segments.existing() if s.startswith(name)] == [foreign.name]
        assert [set(reply.removed_segments) for reply in pool.last_clean_up] == [
            {f"{name}-memory-{rank}", f"{name}-file-{rank}"} for rank in range(2)
        ]
    finally:
        foreign.unlink()


def test_segments_of_killed_ranks_are_removed(rank_pools: RankPools) -> None:
    name = f"harness-test-{uuid.uuid4().hex}"
    pool = rank_pools[2]
    with pytest.raises(RankDied):
        pool.run(rank_functions.leave_segments_and_die, name)
    assert not [s for s in shared_segments.existing() if s.startswith(name)]


def test_pool_has_no_named_segments_while_it_lives(rank_pools: RankPools) -> None:
    pool = rank_pools[2]
    assert not shared_segments.named_after([*pool.pids, pool.port]) - pool.foreign_segments


def test_left_files_are_removed(rank_pools: RankPools) -> None:
    for work_dir in rank_pools[2].run(rank_functions.leave_files):
        assert work_dir.is_dir()
        assert not list(work_dir.iterdir())


def test_changed_state_is_put_back(rank_pools: RankPools) -> None:
    pool = rank_pools[2]
    before = pool.run(rank_functions.observe_state)
    pool.run(rank_functions.leave_changed_state)
    pool.run(rank_functions.leave_zero3_enabled)
    assert pool.run(rank_functions.observe_state) == before
    assert rank_pools[2] is pool
    assert [(s["dtype"], s["grad"], s["zero3"], s["partitions_at_init"]) for s in before] == [
        (torch.float32, True, False, False)
    ] * 2
    assert before[0]["random"] == before[1]["random"]


def test_left_engine_is_destroyed(rank_pools: RankPools) -> None:
    pool = rank_pools[2]
    pool.run(rank_functions.leave_engine)
    assert [reply.destroyed_engines for reply in pool.last_clean_up] == [1, 1]
    pool.run(rank_functions.sum_of_ranks)
    assert [reply.destroyed_engines for reply in pool.last_clean_up] == [0, 0]


def test_unmatched_collective_replaces_the_pool(rank_pools: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "CLEAN_UP_TIMEOUT_S", 2.0)
    pool = rank_pools[2]
    with pytest.warns(PoolReplaced):
        pool.run(rank_functions.leave_collective_unmatched)
    assert not pool.alive
    assert_works(rank_pools, 2)


def test_left_child_process_is_ended(rank_pools: RankPools) -> None:
    pool = rank_pools[1]
    with pytest.warns(PoolReplaced, match="child process .* is still running"):
        (child_pid,) = pool.run(rank_functions.leave_child_process)
    assert wait_until_ended(child_pid)
    assert_works(rank_pools, 1)


def test_rank_that_died_between_tests_is_replaced(rank_pools: RankPools) -> None:
    pid = rank_pools[2].pids[1]
    os.kill(pid, signal.SIGKILL)
    assert rank_pools.start_template().wait_for_exit(pid, TIMEOUT_S) == -signal.SIGKILL
    assert_works(rank_pools, 2)


def test_ranks_end_with_the_template_and_both_are_replaced(rank_pools: RankPools) -> None:
    template = rank_pools.start_template()
    pids = rank_pools[2].pids
    os.kill(template.pid, signal.SIGKILL)
    assert all(wait_until_ended(pid) for pid in (template.pid, *pids))
    assert_works(rank_pools, 2)
    assert rank_pools.start_template().pid != template.pid


PARENT_PROGRAM = """
import sys
from tests.rank_pool import RankPools

with RankPools() as pools:
    template = pools.start_template()
    print(template.pid, *pools[2].pids, flush=True)
    sys.stdin.read()
"""


def test_no_process_outlives_a_killed_session(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_PROGRAM],
        cwd=REPOSITORY_DIR,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY_DIR), "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
    finally:
        parent.kill()
        parent.communicate()
    assert all(wait_until_ended(pid) for pid in pids)
    assert not shared_segments.named_after(pids)


REPORTED_TESTS = """
import os
from pathlib import Path
import pytest
from tests.fault import rank_functions
from tests.harness import RankTimeout, Symptom, distributed, known_fault

ASKED = 54

@distributed(world_size=2)
def test_passes(rank, world_size, shared_dir):
    assert shared_dir.is_dir()
    assert rank < world_size == 2

@distributed(world_size=2)
@pytest.mark.parametrize("wrong", [54])
def test_shows_values(rank, wrong):
    print(f"said by rank {rank}")
    answer = {"value": 42}
    assert answer["value"] == wrong

@known_fault("asks for 54", Symptom(AssertionError, match="assert 42 == 54"))
@distributed(world_size=1)
def test_known_fault():
    Path("PIDS").write_text(f"{os.getpid()} {os.getppid()}")
    assert 42 == ASKED

@known_fault("ranks hang", Symptom(RankTimeout, match="spin_for_ever"))
@distributed(world_size=1, timeout_s=0.5)
def test_known_hang():
    rank_functions.spin_for_ever()

@known_fault("asks for 54", Symptom(AssertionError, match="assert 42 == 54"))
@distributed(world_size=1)
def test_fault_is_gone():
    pass

@known_fault("asks for 54", Symptom(AssertionError, match="assert 42 == 54"))
@distributed(world_size=1)
def test_fails_in_another_way():
    assert 43 == ASKED

@pytest.mark.slow
def test_slow():
    pass
"""


def test_reports_of_pytest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY_DIR))
    monkeypatch.setenv("HOME", HOME)
    pytester.makepyfile(test_reported=REPORTED_TESTS.replace("PIDS", str(pytester.path / "pids")))
    result = pytester.runpytest_subprocess("-p", "tests.distributed_plugin", "--shuffle=3", "-rA")
    result.assert_outcomes(passed=1, failed=3, xfailed=2, skipped=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*asks for 54*"])
    text = result.stdout.str()
    assert "PASSED test_reported.py::test_passes[2ranks]" in text
    for rank in range(2):
        assert f"----- rank {rank}: raised after" in text
        assert f"[stdout]\nsaid by rank {rank}" in text
    assert text.count("AssertionError: assert 42 == 54") >= 2
    assert "AssertionError: assert 43 == 54" in text
    pids = [int(pid) for pid in (pytester.path / "pids").read_text().split()]
    assert len(pids) == 2
    assert all(wait_until_ended(pid) for pid in pids)


@distributed(world_size=(1, 3))
@pytest.mark.parametrize("number", [3, 7])
def test_marked_test_gets_its_arguments(rank: int, world_size: int, number: int, shared_dir: Path) -> None:
    (shared_dir / str(rank)).write_text(str(number))
    torch.distributed.barrier()
    assert sorted(path.name for path in shared_dir.iterdir()) == [str(r) for r in range(world_size)]
    assert torch.distributed.get_rank() == rank
    assert torch.distributed.get_world_size() == world_size
