"""The command line ``relibra``: compares planners on a trace, writes plans to files, and describes traces.

It uses the library, but the library does not import it. It needs the extra ``relibra-jax[cli]``. Each command is a
module of this package and an entry of the table in `relibra_jax.cli.commands`.
"""
