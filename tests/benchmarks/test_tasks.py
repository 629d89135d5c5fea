"""Models and data of the convergence benchmark."""

from __future__ import annotations

import pytest
import torch

from benchmarks.convergence.tasks import TASKS, VOCABULARY, WINDOW, encode


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_model_gives_logits_for_every_label(task):
    train, test = task.load()
    for part in (train, test):
        inputs, labels = part[[0, len(part) - 1]]
        logits = task.build()(inputs)
        assert logits.shape[:-1] == labels.shape
        assert 0 <= labels.min() <= labels.max() < logits.shape[-1]


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_a_language_model_does_not_look_ahead(name):
    torch.manual_seed(0)
    model = TASKS[name].build().eval()
    words = torch.randint(VOCABULARY, (1, WINDOW))
    for changed in (0, WINDOW // 2, WINDOW - 1):
        others = words.clone()
        others[0, changed] = (words[0, changed] + 1) % VOCABULARY
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
    train, test = TASKS["lstm"].load()
    assert len(train) > 50_000
    assert len(test) > 100
    for part in (train, test):
        unknown = (part[range(0, len(part), 7)][1] == 0).float().mean()
        assert unknown < 0.1
