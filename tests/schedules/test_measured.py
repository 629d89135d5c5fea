"""Measured: the largest density that costs no time, on a simulated network and clock."""

from __future__ import annotations

import json
import logging
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import everywhere
from rules import LIKE, made

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.schedules import Measured
from horovod_sparse.schedules.decisions import Candidate
from horovod_sparse.schedules.trials import Trials
from horovod_sparse.transport.in_process import run_ranks

law = pytest.mark.law
DENSITIES = (1.0, 0.1, 0.03, 0.01, 0.002)


class Training:
    """One rank of a training whose steps take as long as computing, or as the bytes, with noise of each rank."""

    def __init__(self, transport, buckets=3, noise=0.0, seed=0, least=1.0, **options):
        self.options, self.transport = Measured.Options(densities=DENSITIES, least=least, **options), transport
        self.time, self.noise, self.events = 0.0, noise, Counter()
        self.exposed = 0.0
        self.generator = np.random.default_rng([seed, transport.rank])
        self.contexts = [
            BucketContext(10, LIKE, bucket, transport.rank, transport.size, transport.allreduce, events=self.events)
            for bucket in range(buckets)
        ]
        self.restart()

    def restart(self):
        self.trials = Trials(self.options, clock=lambda: self.time)

    def train(self, steps, computing, dense, rounding=0.0, selecting=0.0):
        """Run some steps; return the candidates that were sent."""
        used = []
        for _ in range(steps):
            (candidate,) = {self.trials.begin(context, self.exposed) for context in self.contexts}
            seconds = max(computing, share(candidate) * dense) + (rounding if candidate.wire else 0.0)
            seconds += selecting if candidate.density < 1 else 0.0
            noise = 1 + self.noise * self.generator.exponential()
            self.time += seconds * noise
            self.exposed = (seconds - computing) * noise
            used.append(candidate)
        digest = zlib.crc32(repr(used).encode())
        assert (self.transport.allgather_integers(digest) == digest).all()
        return used


def share(candidate):
    """Bytes of a candidate relative to those of everything in 32 bits."""
    return candidate.density * {None: 1.0, "float16": 0.5, "log8": 0.25}[candidate.wire]


@law
@settings(max_examples=40)
@given(
    buckets=st.integers(1, 3),
    dense=st.floats(0.01, 1500.0),
    least=st.sampled_from([0.001, 1.0]),
    rounding=st.sampled_from([0.0, 0.02, 0.3]),
    noise=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1000),
)
def test_the_largest_density_that_costs_no_time_is_found_within_a_hundred_steps(
    transport, buckets, dense, least, rounding, noise, seed
):
    training = Training(transport, buckets, noise, seed, least)
    used = training.train(110, 1.0, dense, rounding)
    seconds = {one: max(1.0, share(one) * dense) + (rounding if one.wire else 0) for one in training.options.candidates}
    least = min(seconds.values())
    if noise:
        assert seconds[used[-1]] <= 1.5 * least
    else:
        possible = [one for one in training.options.candidates if seconds[one] <= 1.05 * least]
        assert used[-1] == possible[-1]
    assert training.events["decisions"] == 1
    # What is hopeless is tried once, and what is larger than a hopeless selection is not tried at all.
    hopeless = [one for one in training.options.candidates if seconds[one] > 2 * least]
    assert all(used.count(one) <= 1 + training.options.trial for one in hopeless)
    selections = [one for one in hopeless if one.density < 1]
    assert sum(map(used.count, selections)) <= 1 + training.options.trial
    assert not selections or not sum(used.count(one) for one in used if one.density == 1)


@law
def test_clear_cases_are_decided_early(transport):
    training = Training(transport)
    used = training.train(100, 1.0, 0.5)
    assert len(training.options.candidates) == 7
    assert used.index(Candidate(1.0)) == 16  # after the selections
    assert used[84:] == [Candidate(1.0)] * 16  # after three rounds of seven trials of four steps
    # One step in ten is slow, as an evaluation is: medians ignore it.
    assert training.events["trial_steps"] == 84
    assert training.events["trial_seconds_dense_float16"] == pytest.approx(1.0)


@law
def test_a_smaller_density_is_tried_only_if_bytes_decide(transport):
    training = Training(transport, least=0.001)
    used = training.train(100, 1.0, 900.0)
    assert used[16:] == [Candidate(0.001)] * 84  # after 0.002 and 0.01, which are far apart, 0.001, and 0.002 again
    assert training.events["trial_seconds_0.001"] == pytest.approx(1.0)
    # What is 0.3 times longer is dropped after three rounds only.
    used = Training(transport, least=0.001).train(100, 1.0, 130.0)
    assert used[28:36] == [Candidate(0.001)] * 4 + [Candidate(0.002)] * 4
    assert used[52:] == [Candidate(0.002)] * 48  # which takes no longer
    assert Candidate(0.001) not in Training(transport, least=0.001).train(300, 1.0, 60.0)
    slow = Training(transport, least=0.001)
    slow.train(28, 1.0, 130.0)
    slow.train(4, 10.0, 130.0)  # all that 0.001 is tried for first, after others were faster
    assert slow.train(100, 1.0, 130.0)[-1] == Candidate(0.002)


@law
def test_another_network_leads_to_other_densities(transport):
    training = Training(transport)
    assert training.train(400, 1.0, 0.5)[-1] == Candidate(1.0)
    assert training.train(200, 1.0, 20.0)[-1] == Candidate(0.03)
    assert training.train(600, 1.0, 0.5)[-1] == Candidate(1.0)  # its steps are as long as before: a probe finds it
    assert training.events["decisions"] == 3


@law
def test_a_link_that_changes_in_the_deciding_step_changes_the_density(transport):
    training = Training(transport, buckets=1)
    while not training.events["decisions"]:
        chosen = training.train(1, 1.0, 10.0)[-1]
    slow = training.train(300, 1.0, 300.0)[-1]
    assert slow.density < chosen.density
    assert training.events["decisions"] == 2


@law
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(50, 400), min_size=5, max_size=30), seed=st.integers(0, 1000))
def test_trials_stay_rare_on_a_network_that_always_changes(transport, lengths, seed):
    training = Training(transport, buckets=1, noise=0.2, seed=seed)
    for number, length in enumerate(lengths):
        training.train(length, 1.0, (0.5, 20.0, 200.0)[number % 3])
    assert training.events["trial_steps"] <= 300 + 0.01 * sum(lengths) + 1


@law
@pytest.mark.parametrize(
    ("dense", "selecting", "exposed"),
    [(0.5, 0.0, 0.0), (0.5, 3.0, 0.0), (400.0, 0.0, 0.0), (750.0, 0.0, 1 / 3), (1000.0, 1.0, 2 / 3)],
)
@pytest.mark.parametrize("at", [0, 3, 30])
def test_the_share_of_the_shortest_step_in_which_ranks_wait_is_reported(transport, dense, selecting, exposed, at):
    """Trials may be interrupted, and ranks differ in speed."""
    training, pace = Training(transport), 1.0 + transport.rank
    training.train(at, pace, pace * dense, selecting=pace * selecting)
    state = training.trials.state_dict()
    training.restart()
    training.trials.load_state_dict(state)
    training.train(110, pace, pace * dense, selecting=pace * selecting)
    assert training.events["trial_exposed_share"] == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("dense", "selecting", "least", "density", "remedy"),
    [
        (5000.0, 0.0, 1.0, "0.002", "try densities=(0.001,) first"),
        (10000.0, 0.0, 0.001, "0.001", "hvs.LocalOptimizer with local_steps=16, or 16 times those that you have"),
        (100.0, 9.0, 1.0, "0.002", "hvs.LocalOptimizer with local_steps=16, or 16 times those that you have"),
    ],
    ids=["bytes", "bytes of the lowest density that was measured", "messages"],
)
def test_a_remedy_is_proposed_once_if_ranks_wait_for_most_of_the_shortest_step(
    caplog, dense, selecting, least, density, remedy
):
    def train(transport):
        training = Training(transport, least=least)
        training.train(400, 1.0, 400.0)
        assert "ranks wait" not in caplog.text
        for slow in (True, False, True):
            training.train(400, 1.0, dense if slow else 400.0, selecting=selecting * slow)
        assert training.events["decisions"] == 4

    run_ranks(1, train)
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith(
        f"even at density {density}, where steps are shortest, ranks wait for 90 % of a step (900"
    )
    assert remedy in message


@law
@pytest.mark.parametrize("at", [0, 5, 50, 107, 300])
def test_a_restored_schedule_continues_with_its_decisions(transport, at):
    training = Training(transport)
    training.train(at, 1.0, 20.0)
    state = training.trials.state_dict()
    training.restart()
    training.trials.load_state_dict(state)
    assert training.trials.state_dict() == state
    assert training.train(110, 1.0, 20.0)[-1] == Candidate(0.03)


@law
def test_recorded_decisions_are_repeated(transport, tmp_path):
    path = str(Path(transport.broadcast_object(tmp_path)) / "decisions.jsonl")
    first = Training(transport, record=path)
    used = [one for dense in (0.5, 20.0, 200.0) for one in first.train(300, 1.0, dense)]
    assert len(set(used)) > 3
    again = Training(transport, decisions=path)
    assert again.train(900, 1.0, 0.5) == used
    # A resumed training goes on in the middle of them.
    early = Training(transport, decisions=path)
    early.train(150, 1.0, 0.5)
    late = Training(transport, decisions=path)
    late.trials.load_state_dict(early.trials.state_dict())
    assert late.train(750, 1.0, 0.5) == used[150:]


@law
def test_other_files_on_other_ranks_are_refused_on_all(transport, tmp_path):
    path = tmp_path / f"{transport.rank}.jsonl"
    path.write_text(json.dumps({"step": 0, "density": DENSITIES[transport.rank % 2], "wire": None}) + "\n")
    training = Training(transport, decisions=str(path))
    refused = False
    try:
        training.train(1, 1.0, 0.5)
    except ValueError as error:
        refused = "different files" in str(error)
    assert everywhere(transport, refused == (transport.size > 1))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "no json",
        '{"step": 1, "density": 1.0, "wire": null}',
        '{"step": 0, "density": 0.5, "wire": null}',
        '{"step": 0, "density": 1.0, "wire": null}\n{"step": 0, "density": 0.1, "wire": null}',
    ],
)
def test_damaged_decisions_are_refused(tmp_path, content):
    path = tmp_path / "decisions.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"decisions=.*cannot be repeated: pass a file"):
        made(Measured, BucketContext(10, LIKE), 0.01, densities=DENSITIES, decisions=str(path))
    with pytest.raises(ValueError, match="cannot be repeated"):
        made(Measured, BucketContext(10, LIKE), 0.01, decisions=str(tmp_path / "missing"))


def test_a_record_that_cannot_be_written_is_reported(tmp_path, caplog):
    schedule = made(Measured, BucketContext(10, LIKE), 0.01, record=str(tmp_path / "missing" / "decisions"))
    assert schedule.densities(Step()) == (0.002,)
    assert "decisions cannot be recorded in" in caplog.text


def test_trials_start_after_the_dense_steps():
    context = BucketContext(10, LIKE)
    schedule = made(Measured, context, 0.01, densities=(1.0, 0.1), dense_steps=3)
    found = [schedule.densities(Step(number=number))[0] for number in range(7)]
    assert found == [1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": 9}, "does not fit 7"),
        ({"alive": [7]}, "does not fit 7"),
        ({"history": [[0, 7]]}, "does not fit 7"),
        ({"times": []}, "does not fit 7"),
        ({"waits": []}, "does not fit 7"),
        ({"waits": [[0.1], *([[]] * 6)]}, "waits of measured must be a list of 0 numbers"),
        ({"reference": -1.0}, "must be a finite number"),
        ({"steps": "x"}, "must be an integer"),
    ],
)
def test_a_damaged_state_is_refused(change, message):
    trials = Trials(Measured.Options())
    with pytest.raises(ValueError, match=message):
        trials.load_state_dict({**trials.state_dict(), **change})


@pytest.mark.parametrize("densities", [(), (0.0,), (2.0, 0.1), "0.1", (True,)])
def test_densities_must_be_fractions(densities):
    with pytest.raises(ValueError, match=r"densities must be numbers in \(0, 1\]"):
        Measured.Options(densities=densities)
