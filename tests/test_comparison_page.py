"""The HTML page of a comparison: whole in one file, escaped, and shown by a browser without a network."""

import base64
import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path

import pytest
from support.pages import CHROMIUM, Page, show_page
from support.traces import save_small_trace

from relibra_jax.cli.main import main
from relibra_jax.evaluation import COLUMNS

SMALL = ["--nodes", "2", "--ranks-per-node", "2", "--replica-slots", "1", "--micro-batches", "4"]
ROWS = ("static", "eplb", "feplb")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Write a trace whose name would be markup if it were not escaped."""
    return save_small_trace(tmp_path_factory.mktemp("traces") / "<b>A&B<script>.npz")


@pytest.fixture(scope="module")
def written(trace, tmp_path_factory):
    """Return the folder of a comparison with a page."""
    folder = tmp_path_factory.mktemp("page")
    options = [*SMALL, "--rows", *ROWS, "--out", str(folder / "out"), "--html", str(folder / "page.html")]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(["compare", str(trace), *options, "--legend"]) == 0
    (folder / "shown").write_text(shown.getvalue())
    return folder


@pytest.mark.slow
def test_compare_writes_a_page_that_holds_everything(written, trace):
    text = (written / "page.html").read_text()
    page = Page(text)
    pictures = [
        base64.b64decode(address.removeprefix("data:image/png;base64,")) for address in page.addresses
    ]
    figures = [(written / "out" / name).read_bytes() for name in ("compare.png", "timeline.png")]
    assert pictures == figures, "the page has both figures, and no other address"
    assert not re.search(r"https?://|@import|url\(", text)
    assert {"script", "b", "link", "iframe"}.isdisjoint(page.tags)
    assert trace.name in page.text
    for option in ("relibra compare", "--ranks-per-node 2", "--rows static eplb feplb"):
        assert option in page.text
    head, *rows, balanced = page.rows
    shown = [each for each in COLUMNS if each.heading and not each.with_residents]
    assert head == ["planner", *(each.heading for each in shown)]
    assert [row[0] for row in rows] == ["static", "eplb", "feplb*"]
    assert balanced[0] == "perfectly balanced"
    numbers = json.loads((written / "out" / "compare.json").read_text())["planners"]
    for row, expected in zip(rows, numbers, strict=True):
        assert len(row) == len(head)
        assert row[head.index("imbalance")] == f"{expected['imbalance']:.4f}"
        assert row[head.index("time")] == f"{expected['modelled_seconds']:.2f}s"
    for each in shown:
        assert each.meaning in page.text, "every column is explained"
        assert f"{each.heading}: {each.meaning}" in " ".join((written / "shown").read_text().split())


REFUSED = {
    "{folder}": "html={folder} is a folder; name a file in it, such as {folder}/compare.html",
    "{folder}/none/page.html": "html={folder}/none/page.html: the folder {folder}/none does not exist",
}


@pytest.mark.parametrize("path", REFUSED)
def test_compare_refuses_an_unwritable_page_before_anything_runs(trace, tmp_path, capsys, path):
    options = ["--out", str(tmp_path / "out"), "--html", path.format(folder=tmp_path)]
    assert main(["compare", str(trace), *SMALL, *options]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"error: {REFUSED[path].format(folder=tmp_path)}\n"
    assert shown.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 500])
def test_compare_page_shows_tables_and_figures_in_a_browser(written, tmp_path, width):
    """A script reports the sizes that the browser gave the pictures; the page itself allows none."""
    policy, script = (
        r'<meta http-equiv="Content-Security-Policy"[^>]*>',
        """<script>
        addEventListener("load", () => {
            for (const image of document.images) image.alt = `${image.naturalWidth} pixels`;
            const { scrollWidth, clientWidth } = document.documentElement;
            document.title = `${scrollWidth - clientWidth} too wide`;
        });
    </script>""",
    )
    text, count = re.subn(policy, lambda _: script, (written / "page.html").read_text())
    assert count == 1
    (tmp_path / "page.html").write_text(text)
    shown = show_page(tmp_path / "page.html", tmp_path / "profile", width=width)
    assert len(re.findall(r'alt="[1-9]\d{2,} pixels"', shown)) == 2
    assert "<title>0 too wide</title>" in shown, "wide tables scroll, the page does not"
    assert [row[0] for row in Page(shown).rows[1:-1]] == ["static", "eplb", "feplb*"]


def test_columns_have_unique_names_and_headings_and_whole_meanings():
    """A number has a name of its own and a meaning in whole sentences; headings are unique."""
    headings = [each.heading for each in COLUMNS if each.heading]
    assert len({each.name for each in COLUMNS}) == len(COLUMNS) > len(headings) == len(set(headings)) > 10
    for each in COLUMNS:
        assert re.fullmatch(r"[A-Z].*\.", each.meaning), each.name


def test_on_page_markdown_explains_every_number_in_the_guide():
    docs = Path(__file__).parents[1] / "docs"
    spec = importlib.util.spec_from_file_location("columns", docs / "mkdocs" / "columns.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = hook.on_page_markdown((docs / "guides" / "comparing-planners.md").read_text(), None, None, None)
    for each in COLUMNS:
        assert f"| {each.heading} | `{each.name}` | {each.meaning} |\n" in page
