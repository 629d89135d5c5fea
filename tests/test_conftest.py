"""An MPI run fails if any test is skipped or none runs."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest

TESTS = Path(__file__).parent
CODE = """
import sys
sys.path[:0] = sys.argv[1:3]
import pytest
sys.exit(pytest.main(["--with-mpi", "-p", "conftest", "-p", "no:cacheprovider", *sys.argv[3:]]))
"""


@pytest.mark.parametrize(
    ("body", "passes"),
    [
        pytest.param("def test_one(): assert True", True, marks=pytest.mark.full),
        ("import pytest\ndef test_one(): assert True\ndef test_two(): pytest.skip('no reason')", False),
        pytest.param(
            "import pytest\ndef test_one(): assert True\n@pytest.mark.mpi(min_size=2)\ndef test_two(): pass",
            False,
            marks=pytest.mark.full,
        ),
    ],
    ids=["all pass", "skipped", "too few ranks"],
)
def test_a_skipped_test_fails_the_run(tmp_path, body, passes):
    (tmp_path / "test_it.py").write_text(body)
    folders = [str(TESTS), str(TESTS.parent / "tools"), f"--rootdir={tmp_path}", str(tmp_path / "test_it.py")]
    result = launch.python("-c", CODE, *folders)
    assert (result.returncode == 0) == passes, result.stdout + result.stderr
    assert ("MPI run failed" in result.stdout) == (not passes)
