"""``python -m relibra_jax.cli``: runs the command line where the console script ``relibra`` is not on the path."""

import sys

from relibra_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
