"""The folder of a training run that only has its files, for what reads them."""

import json
import math

from experiments.rl.metrics import EVALUATE, LEARN, METRICS, WARM_UP

LAYERS, RANKS = 6, 8
SAMPLE = {
    "prompt": "<b>2+2=</b>",
    "response": "<script>alert(1)</script>\n4 & more",
    "reward": 1.0,
    "tokens": 9,
}


def line_of(step, seed=0, kind=LEARN):
    """Return a line with a plausible value of every metric."""
    wave, progress = math.sin(step + seed), step / 40
    named = {
        "reward/mean": 0.3 + 0.5 * progress + 0.06 * wave,
        "evaluation/reward": 0.3 + 0.5 * progress,
        "policy/loss": 0.02 * wave,
        "reward/solved_by_all": 0.1 + 0.4 * progress,
        "reward/solved_by_none": 0.4 - 0.3 * progress,
        "response/tokens": 14 + 4 * progress + wave,
        "response/tokens_quantiles": [6.0, 14.0 + wave, 22.0 + wave, 31.0],
        "response/longest": 31,
        "mismatch/log_prob_quantiles": [1e-7, 4e-7, 2e-6, 9e-6],
        "mismatch/log_prob": 2e-7 + 1e-7 * wave,
        "policy/gradient_norm": 0.8 + 0.3 * wave,
        "balance/imbalance": 1.005 + 0.002 * wave,
        "balance/imbalance_static": 1.42 + 0.05 * wave,
        "balance/imbalance_bound": 1.004,
        "balance/imbalance_by_layer": [1.005 + 0.002 * math.sin(step + layer) for layer in range(LAYERS)],
        "balance/imbalance_static_by_layer": [
            1.3 + 0.25 * math.sin(layer) + 0.1 * math.sin(step / 3) for layer in range(LAYERS)
        ],
        "balance/load_by_rank": [9000 + 20 * rank for rank in range(RANKS)],
        "balance/busy_by_rank": [0.97 + 0.004 * rank for rank in range(RANKS)],
        "time/step_seconds": 4.1 + 0.1 * wave,
        "time/generate_seconds": 1.9 + 0.1 * wave,
        "time/plan_seconds": 0.12,
        "time/size_seconds": 0.03,
        "time/migrate_seconds": 0.2,
        "time/recompute_seconds": 0.5,
        "time/score_wait_seconds": 0.05,
        "time/update_seconds": 1.2,
        "time/modelled_plan_seconds": 0.310,
        "time/modelled_plan_attention_seconds": 0.09,
        "time/modelled_plan_compute_seconds": 0.12,
        "time/modelled_plan_exchange_seconds": 0.06,
        "time/modelled_plan_gather_seconds": 0.01,
        "time/modelled_plan_exposed_seconds": 0.0,
        "time/modelled_plan_push_seconds": 0.01,
        "time/modelled_plan_reorder_seconds": 0.0,
        "time/modelled_plan_rest_seconds": 0.02,
        "time/modelled_staying_seconds": 0.42 + 0.01 * wave,
        "time/modelled_balanced_seconds": 0.30,
        "speed/tokens_per_second": 1210 + 30 * wave,
        "speed/update_tokens_per_second": 4000.0,
        "batch/tokens": 5000,
        "warmup/loss": 2 / (1 + step),
        "memory/device_bytes": None,
        "memory/device_peak_bytes": None,
    }
    values = {name: [0.5] * 4 if metric.listed else 0.5 for name, metric in METRICS.items()} | named
    return {"step": step, "kind": kind} | {
        name: values[name] for name, metric in METRICS.items() if kind in metric.kinds
    }


def write_run(folder, *, seeds=(0, 1), warm_up=4, steps=36, without=()):
    """Write the files of a run before its last evaluation, whose lines have no metric of ``without``."""
    settings = {
        "task": "count",
        "planner": "relibra",
        "policy": "tiny",
        "warmup_steps": warm_up,
        "steps": steps,
    }
    settings |= {"seeds": seeds, "evaluation_batches": 1}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings | {"ranks": {"nodes": 2, "ranks_per_node": 4}}))
    for seed in seeds:
        lines = [line_of(step, seed, WARM_UP) for step in range(warm_up)]
        lines += [line_of(step, seed, EVALUATE) for step in range(warm_up, warm_up + steps, 10)]
        lines += [line_of(step, seed) for step in range(warm_up, warm_up + steps)]
        kept = [{name: value for name, value in line.items() if name not in without} for line in lines]
        samples = [{"step": step, "samples": [SAMPLE] * 4} for step in range(warm_up, warm_up + steps)]
        write_lines(folder / f"seed-{seed}" / "metrics.jsonl", kept)
        write_lines(folder / f"seed-{seed}" / "samples.jsonl", samples)
    return folder


def write_lines(path, lines):
    """Write lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
