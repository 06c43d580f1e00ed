"""Where the time of an update goes on a rank, by the scopes of the layer, from a profile of JAX."""

import collections
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import jax

_METADATA: Final = re.compile(r"%?([\w.-]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"")


def op_names(text):
    return dict(_METADATA.findall(text))


def profile(run, text: str):
    names = op_names(text)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        spans = []
        for plane in data.planes:
            for line in plane.lines:
                for e in line.events:
                    st = dict(e.stats)
                    if "hlo_op" in st:
                        spans.append((e.start_ns, e.end_ns, st["hlo_op"], line.name))
    return names, spans
