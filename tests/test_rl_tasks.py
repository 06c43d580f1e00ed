"""Tasks draw equal examples for equal seeds, and score correct answers with 1."""

import sys

import pytest

from experiments.rl.tasks import TASKS, Example, find_task


@pytest.mark.parametrize("name", TASKS)
def test_built_in_tasks_score_their_answers_1(name):
    task = find_task(name)
    examples = task.sample((3, 7), 200)
    assert examples == task.sample((3, 7), 200)
    assert examples[:5] == task.sample((3, 7), 5)
    assert examples != task.sample((3, 8), 200)
    assert len(set(examples)) > 20
    for example in examples:
        assert task.score(example.answer, example) == 1
        assert task.score("", example) == 0
        assert 0 <= task.score(example.answer + "?", example) < 1


def test_built_in_tasks_have_correct_answers():
    for example in TASKS["add"].sample(0, 20):
        assert example.answer == str(sum(map(int, example.prompt.rstrip("=").split("+"))))
    for example in TASKS["reverse"].sample(0, 20):
        assert example.answer[::-1] == example.prompt.split()[1].rstrip(":")
    for example in TASKS["count"].sample(0, 20):
        _, letter, _, word = example.prompt.rstrip(": ").split()
        assert example.answer == str(word.count(letter))
    assert TASKS["reverse"].score("abxd", Example("", "abcd")) == 0.75
    assert TASKS["copy"].score("abcdabcd", Example("", "abcd")) == 0.5


def test_find_task_names_a_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ValueError, match=r"'chain_sum' must be one of copy, reverse, .* install the extra rl"
    ):
        find_task("chain_sum")


def test_find_task_finds_tasks_of_reasoning_gym():
    pytest.importorskip("reasoning_gym", reason="the extra rl is not installed")
    task = find_task("chain_sum")
    examples = task.sample((0, 1), 5)
    assert [example.prompt for example in examples] == [e.prompt for e in task.sample((0, 1), 5)]
    assert len({example.prompt for example in examples}) > 1
    for example in examples:
        assert task.score(f"{example.answer}\n", example) == 1
        assert task.score("x", example) < 0.1
    with pytest.raises(ValueError, match=r"unknown task 'chain_sums'; similar names are chain_sum"):
        find_task("chain_sums")
