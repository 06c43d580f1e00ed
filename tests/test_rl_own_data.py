"""Prompts, tasks and reward functions of users: files, mixtures, a pool of processes, and evaluations of them."""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from support.runs import SMALL

from experiments.rl.chat_templates import chat_renderer
from experiments.rl.configs import Train
from experiments.rl.evaluation import Evaluation, pass_at_k
from experiments.rl.prompt_files import file_task
from experiments.rl.prompts import Prompts
from experiments.rl.reward_pool import PoolSettings, RewardPool
from experiments.rl.reward_worker import RewardFunction
from experiments.rl.rewards import score_responses, start_pool
from experiments.rl.run_folder import saved_config
from experiments.rl.step_metrics import measure_rewards
from experiments.rl.task_mixtures import find_tasks
from experiments.rl.tasks import TASKS, find_task
from experiments.rl.tokens import BYTES, Message
from experiments.rl.trainer import Trainer
from experiments.run import main

pytestmark = pytest.mark.usefixtures("smallest_policy")
LIMIT = 0.5
MODULE = """
    import os
    import subprocess
    import sys
    import time


    def reward(completion, example):
        if completion == "hang":
            subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)", example["mark"]])
        if completion == "raise":
            raise KeyError("b")
        if completion == "end":
            os._exit(3)
        if completion == "nan":
            return float("nan")
        if completion == "jax":
            return "jax" in sys.modules
        time.sleep(example.get("seconds", 0))
        return len(completion) / example.get("length", 1)


    def alone(completion):
        return 1.0


    def share(completion, example):
        return sum(letter in example["letters"] for letter in completion) / max(len(completion), 1)


    def task():
        from experiments.rl.tasks import Example, Task

        def draw(seed, count):
            return [Example(f"{seed % 100} {number}", "x") for number in range(count)]

        return Task(name="own", draw=draw, score=lambda completion, example: len(example.prompt))


    def nothing():
        return "copy"
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    """Write a user's module, in the current folder and on the module path."""
    folder = tmp_path_factory.mktemp("module")
    (folder / "some_rewards.py").write_text(textwrap.dedent(MODULE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("some_rewards", None)


def write_lines(path, *objects):
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return path


def settings(path, **changes):
    return Train(prompts_file=path, **{"warmup_steps": 0, **changes})


# Rewards in processes


def alive(mark):
    """Return whether a process has this word in its command line."""
    return bool(subprocess.run(["pgrep", "-f", mark], capture_output=True, check=False).stdout)


def runs(process):
    """Return whether a process runs. Zombies do not."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_pool_outlives_rewards_that_hang_raise_and_end_their_process(module):
    function, mark = RewardFunction("some_rewards:reward", of_task=False), f"mark-{os.getpid()}"
    pool = RewardPool([function], PoolSettings(processes=2, seconds=LIMIT))
    texts = ["aa", "hang", "raise", "end", "nan", "jax", "aaaa", "hang"]
    answers = pool.call([(function, (text, {"length": 2, "mark": mark})) for text in texts])
    kinds = [None, "timed_out", "raised", "process_ended", "not_finite", None, None, "timed_out"]
    assert [kind for kind, _ in answers] == kinds
    assert [answers[sample][1] for sample in (0, 5, 6)] == [1.0, 0.0, 2.0], "the processes import no JAX"
    assert answers[2][1] == "KeyError('b')"
    assert "exit status 3" in answers[3][1]
    assert not alive(mark), "what a reward started is killed with it"
    assert pool.call([(function, ("a", {}))]) == [(None, 1.0)]
    pool.close()


def test_a_pool_works_on_several_rewards_at_once(module):
    function = RewardFunction("some_rewards:reward", of_task=False)
    pool = RewardPool([function], PoolSettings(processes=4))
    pool.call([(function, ("a", {}))])
    start = time.perf_counter()
    answers = pool.call([(function, ("a" * number, {"seconds": 0.1})) for number in range(8)])
    assert time.perf_counter() - start < 0.7
    assert answers == [(None, float(number)) for number in range(8)]
    pool.close()


def test_a_process_ends_with_the_run_even_in_the_middle_of_a_reward(module):
    program = """
        import os
        import threading

        from experiments.rl.reward_pool import PoolSettings, RewardPool
        from experiments.rl.reward_worker import RewardFunction

        function = RewardFunction("some_rewards:reward", of_task=False)
        pool = RewardPool([function], PoolSettings(processes=1))
        pool.call([(function, ("a", {}))])
        print(pool._workers[0]._process.pid, flush=True)
        threading.Timer(0.2, lambda: os._exit(0)).start()
        pool.call([(function, ("a", {"seconds": 1000}))])
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    worker = int(process.stdout)
    for _ in range(100):
        if not runs(worker):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {worker} is still there")


def test_a_function_that_processes_cannot_import_is_one_error(module):
    function = RewardFunction("no_such_module:reward", of_task=False)
    pool = RewardPool([function], PoolSettings(processes=1))
    with pytest.raises(ValueError, match="reward no_such_module:reward: a process could not import it"):
        pool.call([(function, ("a", {}))])


def scored(task, examples, completions, **options):
    """Score texts as responses to examples."""
    tokens = BYTES.pad_sequences([BYTES.encode_answer(text) for text in completions], 12)
    return score_responses(task, examples, tokens, tokens != BYTES.pad, **options)


def test_rewards_of_own_tasks_run_in_the_pool_beside_built_in_ones(module):
    task = find_tasks("some_rewards:task=1,copy=1")
    pool = start_pool(task, PoolSettings(processes=1, seconds=5.0))
    examples = task.sample(0, 12)
    rewards = scored(task, examples, ["abc"] * 12, pool=pool)
    pool.close()
    expected = [
        TASKS["copy"].score("abc", example) if example.task == "copy" else len(example.prompt)
        for example in examples
    ]
    assert rewards.reward.tolist() == pytest.approx(expected)
    assert rewards.scored.all()
    assert start_pool(find_task("copy"), PoolSettings()) is None


# Files of prompts

GOOD = [{"prompt": f"{number}?", "answer": str(number), "letters": "ab"} for number in range(40)]


def test_a_file_of_prompts_is_split_by_prompts_and_drawn_by_seed(tmp_path):
    path = write_lines(tmp_path / "mine.jsonl", *GOOD, *GOOD)
    task = file_task(settings(path), BYTES)
    shuffled = file_task(settings(write_lines(tmp_path / "other.jsonl", *reversed(GOOD))), BYTES)
    held = {example.prompt for example in task.sample(0, 100, evaluation=True)}
    assert len(held) == 4
    assert held == {example.prompt for example in shuffled.sample(1, 4, evaluation=True)}
    trained = task.sample((3, 1), 72)
    assert {example.prompt for example in trained} == {line["prompt"] for line in GOOD} - held
    assert trained == task.sample((3, 1), 72)
    assert trained != task.sample((3, 2), 72)
    assert trained[:5] == task.sample((3, 1), 5)
    assert trained[0].entry in GOOD
    assert task.score(f" {trained[0].answer}", trained[0]) == 1
    assert task.score("?", trained[0]) == 0


def test_evaluation_prompts_of_a_file_are_each_asked_once(tmp_path):
    path, other = (
        write_lines(tmp_path / name, *lines)
        for name, lines in (("mine.jsonl", GOOD), ("evaluation.jsonl", GOOD[:8]))
    )
    config = settings(
        path, evaluation=Evaluation(prompts_file=other, samples=1), prompts=8, responses_per_prompt=4
    )
    prompts = Prompts(config, file_task(config, BYTES), BYTES)
    assert not {e.prompt for e in prompts.draw((0,), 100)} & {line["prompt"] for line in GOOD[:8]}
    asked = [example.prompt for number in range(3) for example in prompts.evaluation_groups(number)]
    assert len(asked) == 96
    assert set(collections.Counter(asked).values()) == {12}
    assert asked == [example.prompt for number in range(3) for example in prompts.evaluation_groups(number)]


def test_prompts_that_are_too_long_are_skipped_and_rejected_only_if_none_fits(tmp_path):
    long = [{"prompt": f"{number} " * 30, "answer": "1"} for number in range(50)]
    path = write_lines(tmp_path / "mine.jsonl", *long, GOOD[0])
    other = write_lines(tmp_path / "evaluation.jsonl", GOOD[1])
    evaluation = Evaluation(prompts_file=other)
    task = file_task(settings(path, evaluation=evaluation), BYTES)
    assert [example.prompt for example in task.sample(0, 3)] == ["0?"] * 3
    for changes, says in (
        (
            {"prompt_tokens": 2},
            "none of 51 prompts fits prompt_tokens=2, .* the shortest prompt has 3 tokens",
        ),
        ({"response_tokens": 1}, "with an answer of response_tokens=1"),
    ):
        with pytest.raises(ValueError, match=f"mine.jsonl, line 1 and following: .*{says}"):
            file_task(settings(path, evaluation=evaluation, **changes), BYTES)
    # With a reward of its own and no warm-up, nobody writes the answers.
    config = settings(path, evaluation=evaluation, response_tokens=1, reward="some_rewards:reward")
    assert file_task(config, BYTES).sample(0, 1)[0].entry == GOOD[0]


def test_messages_are_prompts_of_tokenizers_with_a_chat_template(tmp_path):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2?"}]
    line = {"prompt": messages, "answer": "2"}
    path = write_lines(tmp_path / "mine.jsonl", line, line | {"prompt": messages[1:]})
    with pytest.raises(
        ValueError, match=r"mine.jsonl, line .: 'prompt': a list of messages needs a chat template"
    ):
        file_task(settings(path), BYTES)
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    render = chat_renderer(template, {}, place="a template")
    chat = dataclasses.replace(BYTES, encode_prompt=lambda prompt: list(render(messages=prompt).encode()))
    task = file_task(settings(path, prompt_tokens=40), chat)
    [example] = {example.prompt: example for example in task.sample(0, 4)}.values()
    shown = {2: b"<system>Be short.<user>2?", 1: b"<user>2?"}[len(example.prompt)]
    assert bytes(chat.encode_prompt(example.prompt)) == shown
    assert example.prompt[-1] == Message("user", "2?")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON (Expecting property name"),
        ("[" * 100_000, "line 2: not JSON (nested too deeply)"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ('{"promt": "a"}', "line 2: no key 'prompt'; did you mean promt?"),
        ('{"prompt": ""}', "line 2: 'prompt' must be a text or a list of messages, and not empty"),
        ('{"prompt": 3}', "line 2: 'prompt' must be a text"),
        ('{"prompt": ["a"]}', "line 2: 'prompt', message 1 must be an object, not 'a'"),
        (
            '{"prompt": [{"role": "user", "text": "a"}]}',
            "line 2: 'prompt', message 1: 'content' must be a text, not None",
        ),
        ('{"prompt": "a"}', "line 2: no key 'answer', which comparing with it"),
        ('{"prompt": "a", "answer": 3}', "line 2: 'answer' must be a text, not 3"),
        ("\udcff", "line 2: not UTF-8"),
    ],
)
def test_bad_lines_are_named(tmp_path, capsys, line, says):
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps(GOOD[0])}\n{line}\n", errors="surrogateescape")
    assert main(["demo", f"--prompts-file={path}", f"--out={tmp_path / 'out'}"]) == 2
    [error] = (each for each in capsys.readouterr().err.splitlines() if each.startswith("error"))
    assert error.startswith(f"error: {path}, line 2: ")
    assert says in error
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize(
    ("options", "says"),
    {
        (
            "--task=some_rewards:tsk",
        ): "task 'some_rewards:tsk': some_rewards has no 'tsk'; did you mean task?",
        ("--task=not_here:task",): "task 'not_here:task': no module 'not_here'",
        (
            "--task=some_rewards:nothing",
        ): "task 'some_rewards:nothing' returned a str: it must return an experiments",
        ("--task=some_rewards:alone",): "task 'some_rewards:alone' must be a function of ()",
        ("--task=copy=1,copy=2",): "task 'copy=1,copy=2' has 'copy' twice",
        ("--task=copy=0",): "task 'copy=0': the weight '0' must be a positive number",
        ("--task=copy=x,add",): "the weight 'x' must be a positive number",
        ("--task=copy,",): "task 'copy,' must be written NAME=WEIGHT,NAME=WEIGHT",
        ("--task=copi=1,add=1",): "task 'copi' must be one of",
        ("--reward=some_rewards:reward",): "reward=some_rewards:reward needs a prompts_file",
        ("--prompts-file=FILE", "--reward=some_rewards:alone"): "must be a function of (completion, example)",
        (
            "--prompts-file=FILE",
            "--reward=some_rewards",
        ): "reward 'some_rewards' must be written module:attribute",
        ("--prompts-file=nowhere.jsonl",): "nowhere.jsonl: there is no such file",
        (
            "--prompts-file=FILE",
            "--evaluation.prompts-file=FILE",
        ): "all its prompts are in evaluation.prompts_file",
        ("--evaluation.share=0.2",): "evaluation.share=0.2 is for runs with a prompts_file",
        ("--reward-pool.seconds=0",): "reward_pool.seconds=0.0 must be positive",
        ("--reward-pool.processes=2",): "no reward function is given as module:function",
        ("--evaluation.samples=7",): "evaluation.samples=7 must divide the 256 samples of a batch",
        ("--evaluation.pass-at=9",): "evaluation.pass_at=9 must be at most 8",
        ("--evaluation.temperature=0", "--evaluation.samples=2"): "all responses to a prompt would be equal",
    }.items(),
)
def test_main_rejects_bad_tasks_rewards_and_evaluations(tmp_path, capsys, options, says):
    path = write_lines(tmp_path / "mine.jsonl", *GOOD)
    options = [option.replace("FILE", str(path)) for option in options]
    assert main(["demo", f"--out={tmp_path / 'out'}", *options]) == 2
    [error] = (each for each in capsys.readouterr().err.splitlines() if each.startswith("error"))
    assert says in error
    assert not list(tmp_path.rglob("config.json"))


# Mixtures


def test_mixtures_draw_by_weight_and_score_by_task():
    task = find_tasks("numbers=3, copy=1")
    examples = task.sample((0, 1), 2000)
    assert examples == task.sample((0, 1), 2000)
    assert examples[:7] == task.sample((0, 1), 7)
    assert examples != task.sample((0, 2), 2000)
    names = collections.Counter(example.task for example in examples)
    assert names["numbers"] == pytest.approx(1500, abs=80)
    for example in examples[:20]:
        assert example.prompt.startswith("copy") == (example.task == "copy")
        assert task.score(example.answer, example) == 1
    assert task.reply is None
    mixed = find_tasks("calculator,add")
    by_task = {example.task: example for example in mixed.sample(0, 20)}
    assert mixed.reply(["1+1="], by_task["calculator"]) == "2\n"
    assert mixed.reply(["1+1="], by_task["add"]) is None


# Evaluations


def test_pass_at_k_is_the_share_of_draws_with_a_correct_response():
    rng = np.random.default_rng(0)
    correct, has_reward = rng.random((6, 5)) < 0.3, rng.random((6, 5)) < 0.8
    for k in range(1, 6):
        shares = []
        for row, known in zip(correct, has_reward, strict=True):
            draws = list(itertools.combinations(row[known], k))
            if draws:
                shares.append(np.mean([any(draw) for draw in draws]))
        expected = np.mean(shares) if shares else None
        assert pass_at_k(correct, has_reward, k) == (None if expected is None else pytest.approx(expected))


def test_saved_config_equals_the_settings(tmp_path):
    path = write_lines(tmp_path / "mine.jsonl", *GOOD)
    config = settings(
        path,
        reward="some_rewards:reward",
        reward_pool=PoolSettings(processes=3, seconds=0.25),
        evaluation=Evaluation(temperature=0.5, samples=16, pass_at=4, prompts_file=path),
    )
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config), default=str))
    assert saved_config(tmp_path) == config


def mixture(monkeypatch):
    """Return a mixture whose task copy always raises, and the name under which settings have it."""
    failing = dataclasses.replace(TASKS["copy"], score=lambda *_: 1 / 0)
    monkeypatch.setattr("experiments.rl.tasks.TASKS", {**TASKS, "copy": failing})
    return "copy=1,some_rewards:task=3"


def test_failures_are_counted_by_kind_and_rewards_by_task(monkeypatch):
    task = find_tasks(mixture(monkeypatch))
    examples = task.sample(0, 20)
    metrics = measure_rewards(scored(task, examples, ["a"] * 20), task, examples)
    of_copy = sum(example.task == "copy" for example in examples)
    lengths = [len(example.prompt) for example in examples if example.task != "copy"]
    assert 0 < of_copy == metrics["reward/failed_raised"] == metrics["reward/failed"] < 20
    assert metrics["reward/failed_timed_out"] == 0
    assert "ZeroDivisionError" in metrics["failures"][0]
    assert metrics["reward/mean"] == pytest.approx(np.mean(lengths))
    assert metrics["reward/mean_by_task"] == [None, pytest.approx(np.mean(lengths))]


@pytest.mark.slow
def test_greedy_evaluations_of_a_mixture_are_the_same_again(monkeypatch):
    config = Train(
        **SMALL | {"task": mixture(monkeypatch), "evaluation_batches": 1},
        evaluation=Evaluation(temperature=0.0),
    )
    with contextlib.closing(Trainer(config, 0)) as trainer:
        asked, evaluated = trainer.prompts.evaluation_groups(0), trainer.evaluate()
        assert trainer.evaluate() == evaluated
    assert len({example.prompt for example in asked}) == 32, "one response to each of more prompts"
    lengths = [len(example.prompt) for example in asked if example.task != "copy"]
    assert evaluated["evaluation/reward_by_task"] == [None, pytest.approx(np.mean(lengths))]
    assert evaluated["evaluation/samples"] == len(lengths)
    assert evaluated["evaluation/failed"] == 32 - len(lengths)
    assert evaluated["evaluation/pass_at_k"] == 1
