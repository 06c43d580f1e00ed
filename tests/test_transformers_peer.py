"""The other process of `experiments.bench_transformers`, without torch."""

import dataclasses
import importlib.util
import sys

import jax
import numpy as np
import pytest

from experiments import transformers_peer
from experiments.bench_transformers import MODELS, BenchTransformers, main, write_checkpoint
from experiments.program import run_program
from experiments.transformers_peer import Case, Peer, possible_choices
from relibra_jax import Topology
from relibra_jax.models import load_pretrained, pretrained_tensors
from relibra_jax.nnx import expert_mesh

SMALLEST = dataclasses.replace(
    MODELS["tiny"],
    width=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_width=8,
    expert_width=16,
)
WORKER = """
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["call"] == "end":
        os._exit(3)
    print(json.dumps({"result": request} if request["call"] != "load" else {"error": "OSError: no"}), flush=True)
"""


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Replace the worker by one that answers with the requests."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(transformers_peer.transformers_worker, "__file__", str(tmp_path / "worker.py"))


@pytest.mark.usefixtures("worker")
def test_peer_answers_and_reports_errors_in_one_line():
    with Peer(sys.executable) as peer:
        assert peer.versions == {"call": "versions"}
        assert peer.ask("generate", seed=None) == {"call": "generate", "seed": None}
        with pytest.raises(ValueError, match=r"^peer_python='.*' failed in load with OSError: no$"):
            peer.ask("load", folder="missing")
        with pytest.raises(ValueError, match=r"^peer_python='.*' ended with status 3 in end$"):
            peer.ask("end")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="transformers is installed")
def test_python_without_transformers_is_refused_in_one_line(capsys):
    assert run_program(main, BenchTransformers, ["--peer-python", sys.executable]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    *_, line = shown.err.splitlines()
    assert line.startswith(
        f"error: peer_python={sys.executable!r} failed in versions with ModuleNotFoundError"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"peer_python": "no/such/python"}, "peer_python='no/such/python' cannot be started: No such file"),
        ({"models": ("large",)}, "models: 'large' must be one of tiny, wide"),
        ({"repeats": 0}, "repeats=0 must be an integer of at least 1"),
        ({"samples": (12,)}, "samples=12 must be a multiple of 8"),
    ],
)
def test_bad_settings_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        main(BenchTransformers(**option))


def test_responses_are_cut_after_their_ends():
    case = Case(SMALLEST, np.zeros((2, 3), np.int32), 4)
    assert case.cut([[1, case.end, 0, 0], [1, 2, 3, 4]]) == [[1, case.end], [1, 2, 3, 4]]


def test_experts_that_copy_too_much_are_left_out():
    choices = possible_choices(Case(MODELS["tiny"], np.zeros((8, 32), np.int32), 4), compiled=False)
    assert choices["experts"] == ("grouped_mm", "eager", "batched_mm")
    assert choices["cache"] == ("dynamic", "static")
    choices = possible_choices(Case(MODELS["wide"], np.zeros((256, 32), np.int32), 4), compiled=True)
    assert choices["experts"] == ("grouped_mm", "eager")
    assert choices["cache"] == ("dynamic", "static", "compiled")


def test_checkpoint_is_the_same_in_both_rank_layouts(tmp_path):
    folder = write_checkpoint(SMALLEST, tmp_path / "model")
    tensors = []
    for nodes, local in ((2, 4), (1, 1)):
        topology = Topology(num_nodes=nodes, ranks_per_node=local, num_experts=16, replica_slots=0)
        mesh = expert_mesh(topology, devices=jax.devices()[: topology.num_ranks])
        model = load_pretrained(folder, mesh, topology)
        assert model.config == SMALLEST
        tensors.append({name: np.asarray(value) for name, value in pretrained_tensors(model)})
    jax.tree.map(np.testing.assert_array_equal, *tensors)
