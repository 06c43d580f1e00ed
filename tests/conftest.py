"""The configuration of all tests: strict numerics, runtime checks of annotated shapes, and shared fixtures."""

import gc
import os
from pathlib import Path

# Tests compile much and compute little. XLA's older emitters, which build no MLIR pipeline per fusion, halve the time.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests use no table of tile sizes, except one that they write themselves.
os.environ["RELIBRA_TILE_SIZES"] = ""
# A second run of the suite reuses the compiled programs, as do the programs that tests run in processes of their own.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Two threads for each of 8 devices. With fewer, two running programs may wait for each other's threads forever.
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
# Once more, for runs in which a plugin of pytest has imported JAX before.
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# Tracing allocates many objects that live long. Collecting them rarely saves a sixth of its time.
gc.set_threshold(200_000, 50, 1000)
hook = install_import_hook(["relibra_jax", "pallas_kernels", "experiments"], "beartype.beartype")

# The time of examples that compile depends on the load of the machine, so there is no deadline.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

collect_ignore = [
    "quick.py",
    "two_processes.py",
    "learning_process.py",
    "loop_process.py",
    "make_hf_checkpoints.py",
    "check_hf_checkpoints.py",
    "support/tunix_runs.py",
]
"""Programs that tests run, programs that need transformers, and a module that imports Tunix."""

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared():
    """The folder of recorded traces and expected results, which is beside the project and not part of it."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared data at {SHARED}")
    return SHARED


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Clear the compiled programs after each module: each keeps memory maps, of which Linux allows 65,530 a process.

    XLA's flags are those of before again.
    """
    flags = os.environ["XLA_FLAGS"]
    yield
    os.environ["XLA_FLAGS"] = flags  # a run adds its own, which are part of the names of kept programs
    jax.clear_caches()
    gc.collect()
    gc.freeze()  # What a module leaves alive stays, so later collections need not look at it.


@pytest.fixture(scope="module")
def smallest_policy():
    """Register the policy ``smallest`` for runs, and set the XLA options that runs add.

    Kept programs have all options in their names, on CPUs too, so trainers and whole runs share them.
    """
    from support.runs import SMALLEST

    from experiments.rl.devices import overlap_exchanges
    from experiments.rl.policy import POLICIES

    overlap_exchanges()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.rl.configs.POLICIES", {**POLICIES, "smallest": SMALLEST})
        yield
