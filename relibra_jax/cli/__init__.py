"""The command line ``relibra``: planners compared on a trace, plans as files, traces described.

It stands on top of the library, which knows nothing of it, and needs the extra ``relibra-jax[cli]``. A command is a
module here and an entry in `relibra_jax.cli.commands`.
"""
