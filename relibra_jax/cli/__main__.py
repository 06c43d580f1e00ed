"""``python -m relibra_jax.cli``: the console script ``relibra`` where it is not on the path."""

import sys

from relibra_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
