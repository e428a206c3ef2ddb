from __future__ import annotations

from collections.abc import Iterator

import pytest
import threadpoolctl

from asyncflow.devices import BlasLease, acquire_blas_threads
from asyncflow.devices.machine import blas
from asyncflow.devices.machine.blas import blas_libraries


def blas_threads() -> set[int]:
    return {info["num_threads"] for info in threadpoolctl.threadpool_info() if info["user_api"] == "blas"}


@pytest.fixture(autouse=True)
def eight_threads() -> Iterator[None]:
    """Any machine's BLAS begins with 8 threads, so that each change shows."""
    with threadpoolctl.threadpool_limits(8, user_api="blas"):
        assert blas_threads() == {8}, "NumPy's BLAS cannot be controlled here"
        yield
        assert blas_threads() == {8}


def test_the_first_lease_limits_and_the_last_restores() -> None:
    first = acquire_blas_threads(1)
    assert blas_threads() == {1}
    second = acquire_blas_threads(1)
    first.release()
    assert blas_threads() == {1}
    second.release()
    assert blas_threads() == {8}


def test_the_smallest_of_different_counts_wins() -> None:
    three, two, four = (acquire_blas_threads(threads) for threads in (3, 2, 4))
    assert blas_threads() == {2}
    two.release()
    assert blas_threads() == {3}
    three.release()
    assert blas_threads() == {4}
    four.release()


def test_releasing_twice_gives_up_no_other_claim() -> None:
    first, second = acquire_blas_threads(1), acquire_blas_threads(1)
    first.release()
    first.release()
    assert blas_threads() == {1}
    second.release()


def test_a_lease_never_acquired_releases_nothing() -> None:
    held = acquire_blas_threads(1)
    BlasLease(1).release()
    assert blas_threads() == {1}
    held.release()


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, "1"])
def test_a_count_is_a_positive_int(threads: object) -> None:
    with pytest.raises(ValueError, match="the number of BLAS threads is a positive int, not"):
        acquire_blas_threads(threads)  # type: ignore[arg-type]


def test_without_threadpoolctl_blas_keeps_its_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine with cards may run asyncflow from its source tree, with the packages that it has."""
    monkeypatch.setattr(blas, "ThreadpoolController", None)
    monkeypatch.setattr(blas, "_process", type(blas._process)())
    lease = acquire_blas_threads(1)
    assert blas_threads() == {8}
    lease.release()
    assert blas_libraries() == []
    assert "threadpoolctl is not installed" in caplog.text
