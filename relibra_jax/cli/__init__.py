"""The command line ``relibra``: it compares planners on a trace, writes plans to files, describes traces, and more.

Each command is a module or a folder of this package, and an entry of the table in `relibra_jax.cli.commands`. The
package needs the extra ``relibra-jax[cli]``. No other package of the library imports it.
"""
