"""The ping-pong schedule in plain Python."""

import itertools


def run_schedule(attention, experts, exchange):
    """Return the seconds of the schedule, simulated stage by stage per layer and micro-batch; times are ``[L m]``."""
    layers, micro_batches = attention.shape
    free, back = [0.0] * 4, [0.0] * micro_batches
    for layer, m in itertools.product(range(layers), range(micro_batches)):
        now = back[m]
        for stage, times in enumerate((attention, exchange, experts, exchange)):
            now = free[stage] = max(now, free[stage]) + times[layer, m]
        back[m] = now
    return back[-1]
