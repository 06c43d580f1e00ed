"""The page of a run: whole in one file, escaped, for runs in every state, and served while they go."""

import http.client
import json
import os
import re

import pytest
from support.pages import CHROMIUM, Page, show_page
from support.watched import LAYERS, RANKS, SAMPLE, line_of, write_lines, write_run

from experiments.rl.metrics import EVALUATE, LEARN, METRICS
from experiments.watch.__main__ import run
from experiments.watch.page import run_page
from experiments.watch.run_data import read_run
from experiments.watch.server import ADDRESS, serve_run

NEW = {
    *("reward/solved_by_all", "reward/solved_by_none", "response/tokens_quantiles"),
    *("balance/imbalance_by_layer", "balance/imbalance_static_by_layer"),
    *("balance/load_by_rank", "balance/busy_by_rank", "memory/device_bytes", "memory/device_peak_bytes"),
    *(name for name in METRICS if name.startswith("time/modelled_plan_") and name.count("_") > 2),
}
"""Metrics that runs of earlier versions do not have."""


def page_of(folder):
    return run_page(read_run(folder))


def test_watch_writes_one_file_that_holds_everything(tmp_path, capsys):
    folder = write_run(tmp_path / "<i>run", steps=12)
    assert run([str(folder)]) == 0
    assert str(folder / "watch.html") in capsys.readouterr().out.replace("\n", "")
    text = (folder / "watch.html").read_text()
    page = Page(text)
    assert not page.addresses
    assert not re.search(r"https?://|@import|url\(", text)
    assert {"script", "link", "iframe", "i", "img"}.isdisjoint(page.tags), "nothing is loaded or run"
    assert 'http-equiv="refresh"' not in text
    for title in (
        "Reward",
        "Policy loss",
        "Response length",
        "Gradient norm",
        "Mismatch",
        "Speed",
        "Prompts solved",
    ):
        assert f"<h3>{title}</h3>" in text
    for seed in (0, 1):
        assert f"<title>seed {seed}</title>" in text
    for words in (
        "seed 1, 2 begun",
        "16 / 16",
        "Recompute and updates by rank, modelled",
        f"rank {RANKS - 1}",
    ):
        assert words in page.text
    assert f"{LAYERS} layers" in page.text
    for name in ("prompt", "response"):
        assert SAMPLE[name] in page.text, "the text is shown as it is"


def test_heatmap_has_a_cell_for_every_layer_and_step(tmp_path):
    text = page_of(write_run(tmp_path / "run", seeds=(3,), steps=7))
    maps = re.findall(r'<svg class="heat".*?</svg>', text, re.DOTALL)
    assert [len(re.findall(r"h1v1h-1z", each)) for each in maps] == [LAYERS * 7] * 2


def test_last_step_shows_the_share_of_each_rank(tmp_path):
    folder = write_run(tmp_path / "run", seeds=(0,), steps=3)
    line = line_of(6)
    busy, load = line["balance/busy_by_rank"], line["balance/load_by_rank"]
    text = page_of(folder)
    for rank in range(RANKS):
        assert f"{load[rank]:,.0f} copies, {busy[rank]:.1%}" in text
    figure = re.search(r'<svg viewBox="0 0 1200 112".*?</svg>', text, re.DOTALL)[0]
    widths = [
        float(width)
        for width, label in re.findall(r'width="([\d.]+)"[^>]*><title>([^<]*)', figure)
        if label in ("routed experts", "waiting for the busiest rank")
    ]
    work, wait = widths[::2], widths[1::2]
    for rank in range(RANKS):
        assert work[rank] / (work[rank] + wait[rank]) == pytest.approx(busy[rank], abs=1e-3)


def test_page_of_many_ranks_draws_the_idlest_and_the_busiest(tmp_path):
    folder = write_run(tmp_path / "run", seeds=(0,), steps=1)
    many = {"balance/busy_by_rank": [rank / 100 for rank in range(1, 101)], "balance/load_by_rank": [7] * 100}
    write_lines(folder / "seed-0" / "metrics.jsonl", [line_of(4) | many])
    text = page_of(folder)
    assert "68 ranks between the idlest and the busiest are not drawn" in text
    assert [f">rank {rank}<" in text for rank in (0, 15, 16, 83, 84, 99)] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]


def test_page_of_an_older_run_leaves_out_what_its_metrics_lack(tmp_path):
    folder = write_run(tmp_path / "run", without=NEW)
    (folder / "seed-0" / "samples.jsonl").unlink()
    (folder / "seed-1" / "samples.jsonl").unlink()
    text = page_of(folder)
    assert "<h3>Imbalance</h3>" in text
    for words in ("by layer and step", "by rank", "Prompts solved", "Samples"):
        assert words not in text
    write_lines(folder / "seed-0" / "metrics.jsonl", [{"step": 0, "kind": LEARN}])
    write_lines(folder / "seed-1" / "metrics.jsonl", [{"step": 0, "kind": LEARN, "reward/mean": None}])
    assert "<h3>" not in page_of(folder), "a line with nothing but its step and its kind"


def test_page_without_modelled_times_shows_the_counted_work(tmp_path):
    folder = write_run(tmp_path / "run", steps=2, without={name for name in METRICS if "modelled" in name})
    text = page_of(folder)
    assert "work by rank, counted" in text
    assert "modelled</h3>" not in text


def test_page_of_a_run_that_goes_ignores_the_line_being_written(tmp_path):
    folder = write_run(tmp_path / "run", seeds=(0,), steps=2)
    with (folder / "seed-0" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "kind": "le')
    assert ">not finished, last line" in page_of(folder)


def test_a_run_is_finished_after_the_last_evaluation_of_all_its_seeds(tmp_path):
    folder = write_run(tmp_path / "run", steps=2)
    for seed in (0, 1):
        assert not read_run(folder).finished
        with (folder / f"seed-{seed}" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line_of(6, seed, EVALUATE)) + "\n")
    (folder / "summary.json").write_text("{}")
    os.utime(folder / "summary.json", (0, 0))
    assert ">finished, last line" in page_of(folder), "a copy has other times"


@pytest.mark.parametrize(
    ("model", "says"),
    [(None, "count · grpo · tiny model · relibra"), ("/a/Qwen3", "count · grpo · model Qwen3 · relibra")],
)
def test_heading_names_one_model(tmp_path, model, says):
    folder = write_run(tmp_path / "run", steps=1)
    config = json.loads((folder / "config.json").read_text()) | {"algorithm": "grpo", "model": model}
    (folder / "config.json").write_text(json.dumps(config))
    assert f"{says} · 2 nodes of 4 ranks" in Page(page_of(folder)).text


def test_page_of_a_run_before_its_first_step(tmp_path):
    folder = write_run(tmp_path / "run", seeds=())
    assert "has not written a step yet" in page_of(folder)
    write_lines(folder / "seed-0" / "metrics.jsonl", [])
    assert "0 / 40" in page_of(folder)


def break_line(folder):
    (folder / "seed-0" / "metrics.jsonl").write_text("{}\nno\n{}\n")


def break_settings(folder):
    (folder / "config.json").write_text("[1]")


@pytest.mark.parametrize(
    ("breaks", "options", "says"),
    [
        (
            lambda folder: None,
            ["none"],
            "none: no run, because it has neither config.json nor seed-*/metrics.jsonl",
        ),
        (break_line, ["run"], "seed-0/metrics.jsonl: not lines of JSON (Expecting value"),
        (break_settings, ["run"], "run/config.json: not the settings of a run, but a list"),
        (
            lambda folder: None,
            ["run", "--out", "run"],
            "out=run is a folder; name a file in it",
        ),
        (
            lambda folder: None,
            ["run", "--out", "no/page.html"],
            "out=no/page.html: the folder no does not exist",
        ),
        (lambda folder: None, ["run", "--out", "a.html", "--serve", "0"], "serve and out exclude each other"),
        (lambda folder: None, ["run", "--serve", "70000"], "serve=70000: "),
    ],
)
def test_watch_refuses_bad_input_in_one_line(tmp_path, monkeypatch, capsys, breaks, options, says):
    monkeypatch.chdir(tmp_path)
    breaks(write_run(tmp_path / "run", seeds=(0,), steps=1))
    assert run(options) == 2
    shown = capsys.readouterr()
    [line] = shown.err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not list(tmp_path.rglob("*.html"))


def answer(port, path="/"):
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=10)
    connection.request("GET", path)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def test_served_page_reloads_and_reads_the_run_at_every_request(tmp_path):
    folder = write_run(tmp_path / "run", seeds=(0,), steps=2)
    with serve_run(folder, 0) as server:
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        status, text = answer(port)
        assert status == 200
        assert '<meta http-equiv="refresh" content="5">' in text
        assert "Step 5, the last" in text
        with (folder / "seed-0" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line_of(6)) + "\n")
        assert "Step 6, the last" in answer(port)[1]
        assert answer(port, "/seed-0/metrics.jsonl")[0] == 404, "only the page is served"
        with pytest.raises(ValueError, match=f"serve={port}: .*in use"), serve_run(folder, port):
            pass
        break_line(folder)
        status, text = answer(port)
        assert status == 500
        assert "not lines of JSON" in text
        write_lines(folder / "seed-0" / "metrics.jsonl", [line_of(6, kind=EVALUATE)])
        assert 'http-equiv="refresh"' not in answer(port)[1], "a finished run does not change"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 500])
def test_page_fits_a_browser(tmp_path, width):
    """A script reports the sizes that the browser gave the figures; the page itself allows none."""
    policy, script = (
        r'<meta http-equiv="Content-Security-Policy"[^>]*>',
        """<script>
        addEventListener("load", () => {
            const small = [...document.querySelectorAll("svg")].filter(each => each.clientHeight < 15).length;
            const { scrollWidth, clientWidth } = document.documentElement;
            document.title = `${scrollWidth - clientWidth} too wide, ${small} too small`;
        });
    </script>""",
    )
    text, count = re.subn(policy, lambda _: script, page_of(write_run(tmp_path / "run")))
    assert count == 1
    (tmp_path / "page.html").write_text(text)
    shown = show_page(tmp_path / "page.html", tmp_path / "profile", width=width)
    assert "<title>0 too wide, 0 too small</title>" in shown
