"""What every test shares: strict numerics and runtime checks of the shapes written in annotations."""

import os
from pathlib import Path

# Tests compile much and compute little. XLA's former emitters build no MLIR pipeline for every fusion: half the time.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No table of tile sizes but a test's own.
os.environ["RELIBRA_TILE_SIZES"] = ""
# Two threads for each of 8 devices: with fewer, two programs under way may wait for each other's threads forever.
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
# A second run of the suite finds its programs compiled.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
hook = install_import_hook(["relibra_jax", "pallas_kernels", "experiments"], "beartype.beartype")

# Examples that compile take as long as the machine is busy.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

collect_ignore = [
    "two_processes.py",
    "learning_process.py",
    "make_hf_checkpoints.py",
    "check_hf_checkpoints.py",
    "support/tunix_runs.py",
]
"""Programs: those that tests run, two that need transformers; and what only tests with Tunix import."""

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared():
    """The folder of real traces and expected results, kept beside the project and not part of it."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared data at {SHARED}")
    return SHARED


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Every compiled program keeps memory mapped, and a process may hold no more than 65,530 maps on Linux."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def smallest_policy():
    """Lets runs name the policy ``smallest``, and keeps what they compile out of their folders."""
    from support.runs import SMALLEST

    from experiments.rl.policy import POLICIES

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.rl.configs.POLICIES", {**POLICIES, "smallest": SMALLEST})
        patch.setattr("experiments.rl.train.keep_compiled", lambda: None)
        yield
