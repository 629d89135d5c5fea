"""kept: made once for each communicator and name."""

from __future__ import annotations

import pytest

from horovod_sparse.mpi.kept import kept
from horovod_sparse.mpi.messenger import Messenger

pytestmark = pytest.mark.mpi


@pytest.fixture
def fresh(comm):
    mine = comm.Dup()
    yield mine
    mine.Free()


def test_a_thing_is_made_once_for_each_name_and_communicator(fresh):
    made = []
    for comm, name in ((fresh, "one"), (fresh, "one"), (fresh, "other"), (fresh, "one")):
        assert kept(comm, name, lambda name=name: made.append(name) or name) == name
    copy = fresh.Dup()
    assert kept(copy, "one", lambda: "of the copy") == "of the copy"
    assert kept(fresh, "one", lambda: "anew") == Messenger(fresh).kept("one", lambda: "anew") == "one"
    assert made == ["one", "other"]
    copy.Free()


def test_what_is_made_may_keep_something_itself(fresh):
    assert kept(fresh, "outer", lambda: ["outer", kept(fresh, "inner", lambda: "inner")]) == ["outer", "inner"]
    assert kept(fresh, "inner", lambda: "anew") == "inner"
    assert kept(fresh, "outer", lambda: "anew") == ["outer", "inner"]


def test_what_could_not_be_made_is_tried_again(fresh):
    with pytest.raises(ZeroDivisionError):
        kept(fresh, "it", lambda: 1 // 0)
    assert kept(fresh, "it", lambda: "made") == "made"
