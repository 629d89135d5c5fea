"""Models and data of the convergence benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.convergence.runs import CONFIRMATION, LARGE, SMALL, TEN_MILLION
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.tasks.text import STDLIB_VOCABULARY, VOCABULARY, WINDOW, encode

SEVERAL = [pytest.param(TASKS[name], id=name) for name in SMALL]
# These read 30 and 10 MB.
SEVERAL += [pytest.param(TASKS[name], id=name, marks=pytest.mark.full) for name in ("stdlib", CONFIRMATION)]


@pytest.mark.parametrize("task", SEVERAL)
def test_a_model_gives_logits_for_every_label(task):
    train, test = task.load(Path())
    for part in (train, test):
        inputs, labels = part[[0, len(part) - 1]]
        logits = task.build()(inputs)
        assert logits.shape[:-1] == labels.shape
        assert 0 <= labels.min() <= labels.max() < logits.shape[-1]


@pytest.mark.parametrize("name", [*LARGE, CONFIRMATION])
def test_models_of_the_large_tasks_have_a_million_parameters(name):
    assert sum(parameter.numel() for parameter in TASKS[name].build().parameters()) > 1_000_000


def test_the_larger_model_has_ten_million_parameters():
    assert sum(parameter.numel() for parameter in TASKS[TEN_MILLION].build().parameters()) == pytest.approx(
        1e7, rel=0.01
    )


def test_the_cnn_takes_pictures_of_28_pixels():
    assert TASKS["fashion-mnist"].build()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.full
@pytest.mark.parametrize(("name", "words"), [("stdlib", 2_000_000), (CONFIRMATION, 2_500_000)])
def test_files_are_in_one_part_each_and_the_test_part_is_a_tenth(name, words):
    train, test = TASKS[name].load(Path())
    assert len(train) > words
    assert 900 <= len(test) <= 1100
    for part in (train, test):
        words, following = part[range(0, len(part), len(part) // 500)]
        assert 0 <= words.min() <= words.max() < STDLIB_VOCABULARY
        assert (following == 0).float().mean() < 0.2


@pytest.mark.parametrize("name", ["lstm", "transformer", "stdlib", CONFIRMATION])
def test_a_language_model_does_not_look_ahead(name):
    torch.manual_seed(0)
    model = TASKS[name].build().eval()
    vocabulary = VOCABULARY if name in SMALL else STDLIB_VOCABULARY
    words = torch.randint(vocabulary, (1, WINDOW))
    for changed in (0, WINDOW // 2, WINDOW - 1):
        others = words.clone()
        others[0, changed] = (words[0, changed] + 1) % vocabulary
        same = (model(words) == model(others)).all(-1)[0]
        assert same[:changed].all()
        assert not same[changed]


def test_stretches_are_followed_by_their_words():
    train, test = encode(" ".join(f"w{number % 50}" for number in range(1000)).split("\n\n"))
    words, following = train[range(len(train))]
    assert len(train) == 900 - WINDOW
    assert torch.equal(words[1:], following[:-1])
    words, following = test[range(len(test))]
    assert len(test) == (100 - 1) // WINDOW
    assert torch.equal(words[1:, 0], following[:-1, -1]), "the test part is cut without gaps"


def test_words_that_only_the_test_part_has_share_one_number():
    train, test = encode([" ".join(["seen"] * 900 + ["new", "seen"] * 50)])
    assert train[[0]][0].unique().tolist() == [1]
    assert test[[0]][0].tolist() == [[0, 1] * (WINDOW // 2)]


def test_the_most_frequent_words_are_numbered():
    words = [f"w{number}" for number in range(2 * VOCABULARY) for _ in range(1 + (number < VOCABULARY - 1))]
    train, _ = encode([" ".join(words + ["filler"] * (len(words) // 9))])
    numbers = train[range(0, len(train), WINDOW)][0].unique()
    assert numbers.tolist() == list(range(VOCABULARY))


def test_a_paragraph_counts_once():
    paragraphs = [" ".join(f"w{number}" for number in range(start, start + 500)) for start in (0, 500)]
    once, _ = encode(["\n\n".join(paragraphs)])
    twice, _ = encode(["\n\n".join([*paragraphs, paragraphs[0]]), paragraphs[1]])
    assert len(once) == 900 - WINDOW
    assert torch.equal(once[range(len(once))][0], twice[range(len(twice))][0])


def test_the_text_is_large_enough_and_known_words_are_most_of_it():
    train, test = TASKS["lstm"].load(Path())
    assert len(train) > 50_000
    assert len(test) > 100
    for part in (train, test):
        unknown = (part[range(0, len(part), 7)][1] == 0).float().mean()
        assert unknown < 0.1
