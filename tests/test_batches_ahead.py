"""Batches are sampled ahead within the bound of staleness, one after the other."""

import functools
import threading
from concurrent.futures import wait

import numpy as np
import pytest

from experiments.engines.protocol import Generation
from experiments.rl.batches_ahead import BatchesAhead
from experiments.rl.generation import Responses

STEPS, FIRST = 9, 2
EMPTY = Responses(
    *[np.zeros((1, 1), bool)] * 3, np.zeros((1, 1, 1, 1), np.uint8), np.zeros((1, 1)), np.zeros(1, bool)
)


class SlowEngine:
    """An engine that samples two tokens of a batch, each when it is allowed to, with the weights that it has then."""

    def __init__(self):
        self.version, self.begun = None, []
        self.allowed = threading.Semaphore(0)

    def sample(self, step):
        self.begun.append((step, self.version))
        tokens = []
        for _ in range(2):
            assert self.allowed.acquire(timeout=30)
            tokens.append(self.version)
        return Generation(EMPTY, np.array([tokens]), np.zeros(1, bool), np.zeros(1, np.int32))


def run(staleness, quick):
    """Take the batches of all steps; a quick engine samples all later ones that it may while each step learns."""
    engine = SlowEngine()
    ahead = BatchesAhead(staleness, STEPS, lambda step: functools.partial(engine.sample, step))
    ages = []
    for step in range(FIRST, STEPS):
        engine.version = step
        engine.allowed.release(2)
        generation = ahead.take(step)
        ages.append(step - generation.version[0])
        if quick and ahead._batches:
            engine.allowed.release(2 * len(ahead._batches))
            wait(ahead._batches)
    ahead.forget()
    ahead.wait()
    return engine, np.array(ages)


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_token_is_older_than_the_bound(staleness):
    """However quick the engine is."""
    engine, ages = run(staleness, quick=True)
    assert [step for step, _ in engine.begun] == list(range(FIRST, STEPS)), "and no step is left out"
    assert all(step - version <= staleness for step, version in engine.begun)
    assert ages.min() >= 0
    assert ages.max() == staleness, "a quick engine samples as far ahead as it may"


def test_a_slow_engine_gives_newer_tokens():
    _, ages = run(2, quick=False)
    assert not ages.any()


def test_an_error_of_a_batch_comes_with_its_step():
    def sample(step):
        if step == 1:
            raise ValueError("no server")
        return Generation(EMPTY, np.array([[step]]), np.zeros(1, bool), np.zeros(1, np.int32))

    ahead = BatchesAhead(1, 3, lambda step: functools.partial(sample, step))
    assert ahead.take(0).version[0, 0] == 0
    with pytest.raises(ValueError, match="no server"):
        ahead.take(1)
    ahead.forget()
    ahead.wait()
