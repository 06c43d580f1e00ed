"""HTML pages in tests: their parts, and how a browser shows them."""

import html.parser
import shutil
import subprocess

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(html.parser.HTMLParser):
    """The parts of a page that a test looks at."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.rows, self.text, self.in_cell = [], [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        self.in_cell &= tag not in ("td", "th")

    def handle_data(self, text):
        self.text += text
        if self.in_cell:
            self.rows[-1][-1] += text


def show_page(path, profile, *, width, options=("--dump-dom",)):
    """Return what a browser prints after loading a page without a network: the document, for ``--dump-dom``."""
    quiet = ("disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-sync")
    switches = [f"--{name}" for name in ("headless", "no-sandbox", "disable-component-update", *quiet)]
    command = [
        *(CHROMIUM, *switches, *options, "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(f"--user-data-dir={profile}", f"--window-size={width},900", path.as_uri()),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
