"""The environment variables of launchers are read and checked before anything connects."""

import pytest

from experiments.rl.launchers import Launch, find_launch
from experiments.run import main

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "node1:9000", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        (SLURM, Launch(None, 2, 1, True)),
        (OPEN_MPI, Launch(None, 2, 1, True)),
        (SLURM | OPEN_MPI | BY_HAND, Launch("node1:9000", 2, 1, True)),
        (BY_HAND, Launch("node1:9000", 2, 1, False)),
        # The pod has only an index. Without the kubernetes package, the other variables are set by hand.
        (KUBERNETES | {k: BY_HAND[k] for k in list(BY_HAND)[:2]}, Launch("node1:9000", 2, 1, False)),
    ],
)
def test_find_launch_reads_every_launcher(variables, launch):
    assert find_launch(variables) == launch


@pytest.mark.parametrize(
    "variables",
    [
        {},
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        # A shell inside an allocation, and a pod of a job with independent pods.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        KUBERNETES,
    ],
)
def test_find_launch_returns_none_for_a_process_alone(variables):
    assert find_launch(variables) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (SLURM | {"SLURM_PROCID": "4"}, "SLURM_NTASKS=2, SLURM_PROCID=4: .* the last of 2 is 1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=2: "),
        (
            SLURM | OPEN_MPI | {"SLURM_NTASKS": "4"},
            "OMPI_COMM_WORLD_SIZE=2, SLURM_NTASKS=4 contradict each other; .*env -u SLURM_NTASKS",
        ),
        (
            SLURM | OPEN_MPI | {"SLURM_PROCID": "0"},
            "OMPI_COMM_WORLD_RANK=1, SLURM_PROCID=0 contradict each other",
        ),
        (SLURM | BY_HAND | {"JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID=0, SLURM_PROCID=1 contradict"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "3"}, "SLURM_NTASKS=2, SLURM_STEP_NUM_TASKS=3 contradict"),
        (SLURM | {"SLURM_NTASKS": "two"}, "SLURM_NTASKS='two' must be a whole number of at least 1"),
        (BY_HAND | {"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID='-1' must be a whole number of at least 0"),
        (
            {"JAX_NUM_PROCESSES": "2"},
            "JAX_NUM_PROCESSES=2 without JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID",
        ),
        (BY_HAND | {"JAX_COORDINATOR_ADDRESS": "node1"}, "JAX_COORDINATOR_ADDRESS=node1 must be HOST:PORT"),
    ],
)
def test_find_launch_names_contradictory_variables(variables, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        find_launch(variables)


def test_main_rejects_bad_variables_before_it_connects(monkeypatch, capsys, tmp_path):
    for name, value in (SLURM | {"SLURM_PROCID": "2"}).items():
        monkeypatch.setenv(name, value)
    assert main(["demo", "--out", str(tmp_path / "run")]) == 2
    expected = "error: SLURM_NTASKS=2, SLURM_PROCID=2: processes are counted from 0, so the last of 2 is 1\n"
    assert capsys.readouterr().err == expected
    assert not list(tmp_path.iterdir())
