"""A server of the page of a run, on this machine alone, which reads the run's files at every request."""

import http
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from experiments.watch.page import run_page
from experiments.watch.run_data import read_run

ADDRESS: Final = "127.0.0.1"
RELOAD_SECONDS: Final = 5
"""The seconds after which a served page reloads itself."""


@contextmanager
def serve_run(folder: Path, port: int) -> Iterator[http.server.ThreadingHTTPServer]:
    """Serve the page of a run on `ADDRESS` while the block runs; yield the server.

    Args:
        folder: the folder of the run.
        port: the port; 0 chooses a free one.

    Raises:
        ValueError: if the port does not exist or is in use.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(http.HTTPStatus.NOT_FOUND)
                return
            try:
                text, kind = run_page(read_run(folder), reload_seconds=RELOAD_SECONDS), "text/html"
                status = http.HTTPStatus.OK
            except (ValueError, OSError) as error:
                text, kind, status = f"error: {error}\n", "text/plain", http.HTTPStatus.INTERNAL_SERVER_ERROR
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    try:
        server = http.server.ThreadingHTTPServer((ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        raise ValueError(f"serve={port}: {error}") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
