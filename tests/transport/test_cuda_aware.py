"""cuda_aware: the environment says whether MPI takes arrays of the device, or the library does."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest
from devices import emulated
from mpi4py import MPI

from horovod_sparse.transport import cuda_aware


@pytest.fixture
def undecided(monkeypatch):
    monkeypatch.delenv(cuda_aware.VARIABLE, raising=False)
    cuda_aware.cuda_aware.cache_clear()
    yield
    cuda_aware.cuda_aware.cache_clear()


@pytest.mark.parametrize(
    ("setting", "says", "expected"),
    [("0", True, False), ("auto", True, True), ("auto", False, False), ("auto", None, False), (None, True, True)],
)
def test_the_environment_decides_or_the_library_is_queried_once(monkeypatch, undecided, setting, says, expected):
    if setting is not None:
        monkeypatch.setenv(cuda_aware.VARIABLE, setting)
    asked = []
    monkeypatch.setattr(cuda_aware, "ask_library", lambda: asked.append(1) or says)
    assert [cuda_aware.cuda_aware() for _ in range(3)] == [expected] * 3
    assert len(asked) == (setting != "0")


@pytest.mark.parametrize("setting", ["", "yes", "2", "AUTO"])
def test_any_other_setting_is_refused(monkeypatch, undecided, setting):
    monkeypatch.setenv(cuda_aware.VARIABLE, setting)
    with pytest.raises(ValueError, match=f"HOROVOD_SPARSE_CUDA_AWARE must be 0, 1 or auto, not '{setting}'"):
        cuda_aware.cuda_aware()


def test_the_library_that_mpi4py_is_linked_to_is_queried():
    assert MPI.Is_initialized()
    names = [Path(name).name for name in cuda_aware.mpi_libraries()]
    assert names
    assert all(name.startswith(("libmpi.so", "libmpich")) for name in names)


INSIST = """
import os, sys
sys.path[:0] = sys.argv[1:]
os.environ.update(HOROVOD_SPARSE_CUDA_AWARE="1", PYTHONPATH=os.pathsep.join(sys.argv[1:]))
from mpi4py import MPI
from horovod_sparse.transport import cuda_aware
for mpi in ("yes", "crash", "garbage", ""):
    os.environ["EMULATED_CUDA_AWARE_MPI"] = mpi
    cuda_aware.cuda_aware.cache_clear()
    cuda_aware._why_not.cache_clear()
    for _ in range(2):
        try:
            print(cuda_aware.cuda_aware())
        except RuntimeError as error:
            print(error)
"""


@pytest.mark.full
def test_a_wrong_setting_is_an_error_and_no_crash():
    """Below mpirun, whose rank the process that tries it must not become."""
    here = Path(__file__).parents[1]
    folders = [str(here.parent), *([str(here / "cuda" / "emulation")] if emulated() else [])]
    result = launch.python("-c", INSIST, *folders, ranks=1)
    assert result.returncode == 0, result.stderr
    answers = result.stdout.splitlines()
    first, second = answers[::2], answers[1::2]
    assert first == second
    errors = ("a test ended with status -6", "wrong data arrived in a message of 1 bytes", "a test ended with status 1")
    if emulated():
        assert first[0] == "True"
        assert all(error in answer for error, answer in zip(errors, first[1:], strict=True))
    for answer in first:
        wrong = "HOROVOD_SPARSE_CUDA_AWARE is 1, but this MPI cannot send" in answer
        assert answer == "True" or (wrong and "Set it to 0 or unset it" in answer)
