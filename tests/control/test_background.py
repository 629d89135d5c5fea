"""Functions run in order on one thread, which ends on close() or with its object."""

from __future__ import annotations

import gc
import threading
import time

import launch
import pytest

from horovod_sparse.control.background import Background


def thread_of(background):
    return background.submit(threading.current_thread).result(10)


def test_functions_run_one_at_a_time_in_the_order_of_submission():
    background, gate, log = Background("a name"), threading.Event(), []
    background.submit(lambda: gate.wait(10))
    futures = [background.submit(lambda number=number: log.append(number)) for number in range(100)]
    assert background.busy
    assert log == []
    gate.set()
    for future in futures:
        future.result(10)
    assert log == list(range(100))
    assert not background.busy
    assert thread_of(background).name == "a name"


def test_an_exception_is_set_on_the_future_and_the_thread_continues():
    background = Background("")
    future = background.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        future.result(10)
    assert background.submit(lambda: "on").result(10) == "on"


def test_close_waits_for_what_was_submitted_and_the_next_submission_starts_a_thread():
    background, log = Background(""), []
    background.close()
    first = thread_of(background)
    background.submit(lambda: (time.sleep(0.2), log.append("slow")))
    background.close()
    assert log == ["slow"]
    assert not first.is_alive()
    second = thread_of(background)
    assert second is not first
    background.close()
    background.close()


def test_the_thread_ends_with_its_object_after_what_was_submitted():
    background, log = Background(""), []
    thread = thread_of(background)
    background.submit(lambda: (time.sleep(0.2), log.append("slow")))
    del background
    gc.collect()
    thread.join(10)
    assert log == ["slow"]
    assert not thread.is_alive()


@pytest.mark.parametrize("kept", [True, False], ids=["an object that is kept", "a garbage-collected object"])
def test_a_program_that_ends_completes_what_was_submitted(kept):
    """Python would abort a thread that is inside of torch."""
    script = (
        "import torch\n"
        "from horovod_sparse.control.lifecycle import process\n"
        "def many(): [torch.ones(1000).add_(1) for _ in range(3000)]; print('done')\n"
        "background = process.background('')\n"
        "background.submit(many)\n"
    )
    done = launch.python("-c", script if kept else f"{script}del background\n")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
