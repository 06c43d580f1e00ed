"""Compiled programs: kept on disk, named while they take long, and listed by `experiments.compile_time`."""

import time

import jax
import jax.numpy as jnp
import pytest

from experiments.compile_time import log_programs, programs_table
from relibra_jax.support.programs import (
    COMPILED,
    KEEP_NOTHING,
    LOWERED,
    compilation_listener,
    keep_programs,
    keep_programs_unless,
)


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    """No compilation cache is set, and the user's cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "relibra_jax" / "programs"
    for name, value in before.items():
        jax.config.update(name, value)


def test_keep_programs_says_once_where_programs_are_kept(no_cache, capsys):
    assert keep_programs() == no_cache
    assert jax.config.jax_compilation_cache_dir == str(no_cache)
    assert capsys.readouterr().err == f"relibra_jax: compiled programs are kept in {no_cache}\n"
    no_cache.mkdir(parents=True)
    jax.config.update("jax_compilation_cache_dir", None)
    assert keep_programs() == no_cache
    assert not capsys.readouterr().err


def test_keep_programs_leaves_the_callers_cache(no_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert keep_programs() == tmp_path / "mine"
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert keep_programs(tmp_path / "other") is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_keep_programs_unless_obeys_its_option(no_cache):
    assert keep_programs_unless(["--steps", "3", KEEP_NOTHING]) == ["--steps", "3"]
    assert jax.config.jax_compilation_cache_dir is None
    assert keep_programs_unless(["--steps", "3"]) == ["--steps", "3"]
    assert jax.config.jax_compilation_cache_dir == str(no_cache)


def test_compilation_listener_names_slow_programs_alone(capsys):
    listen = compilation_listener(0.2)
    listen(LOWERED, 0.1, fun_name="jit(quick)")
    listen(COMPILED, 0.1, fun_name="jit(quick)")
    listen(LOWERED, 0.1, fun_name="jit(_slow)")
    time.sleep(0.6)
    listen(COMPILED, 0.6, fun_name="jit(_slow)")
    assert capsys.readouterr().err == "relibra_jax: compiling slow, which takes more than 0.2 s\n"


def test_log_programs_lists_programs_and_why_they_were_compiled_again():
    def triple(x):
        return 3 * x + 1

    step = jax.jit(triple)
    with log_programs() as log:
        for size in (3, 4):
            step(jnp.ones(size))
    again = [program for program in log.programs if program.name == "triple"]
    assert len(again) == 2
    assert all(program.compiling > 0 and program.instructions > 1 for program in again)
    (reason,) = log.causes["triple"]
    assert "now f32[4] and before f32[3]" in reason
    (row,) = [
        row
        for row in zip(*(column.cells for column in programs_table(log, "").columns), strict=True)
        if row[0] == "triple"
    ]
    assert row[1] == "2"
    assert "f32[4]" in row[-1]
