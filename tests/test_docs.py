"""The pages of docs/ and the README: examples run, commands and link targets exist, and the reference is complete.

A block of Python on a page is one of these:

- with ``>>>``: a doctest, run with all others of its page;
- without a title: run, with the blocks before it on the same page;
- ```` ```python title="PATH" ````: an excerpt; each of its lines is in that file, which has tests of its own;
- ```` ```python title="Not run: REASON" ````: compiled, and what it imports from this project exists.
"""

import ast
import contextlib
import doctest
import importlib
import importlib.util
import os
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest

from experiments.rl.config_file import read_config
from experiments.rl.configs import Train
from experiments.run import own_options, parse_runs
from relibra_jax.cli.commands import COMMANDS
from relibra_jax.cli.main import main
from relibra_jax.contract import types

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md"]
LINKED += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "experiments").rglob("*.md"))

FENCE = re.compile(r"^( *)```(\w+)(?: title=\"(.*?)\")?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
NOT_RUN = "Not run: "
STAND_INS = {"out/tiny": str(ROOT / "tests" / "golden" / "hf" / "qwen3_moe")}
"""Existing files in place of those that earlier commands of a page create: here, a checkpoint."""


def text_of(page):
    return (ROOT / page).read_text()


def blocks(page, *languages):
    """Return the code blocks of a page as (title, code)."""
    matches = [(match[3] or "", match[4]) for match in FENCE.finditer(text_of(page)) if match[2] in languages]
    return [(title, textwrap.dedent(code)) for title, code in matches]


def python_blocks(page):
    return [(title, code) for title, code in blocks(page, "python") if ">>> " not in code]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Enter an empty folder to run a page in, beside the tests' own files."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)


SLOW_PAGES = ("counts", "comparing-planners", "flax-loop", "sharing-a-cluster", "timescales")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (Path(page).stem in SLOW_PAGES))
        for page in PAGES
        if ">>> " in text_of(page)
    ],
)
def test_doctests_print_what_the_page_says(page, folder):
    result = doctest.testfile(str(ROOT / page), module_relative=False)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(not title for title, _ in python_blocks(page))]
)
def test_blocks_without_a_title_run(page, folder):
    namespace = {"__name__": "page"}
    for title, code in python_blocks(page):
        if not title:
            exec(compile(code, page, "exec"), namespace)


EXCERPTS = [(page, title, code) for page in PAGES for title, code in python_blocks(page) if title]


@pytest.mark.parametrize(("page", "title", "code"), EXCERPTS)
def test_blocks_with_a_title_are_what_it_says(page, title, code):
    tree = compile(code, page, "exec", ast.PyCF_ONLY_AST)
    if title.startswith(NOT_RUN):
        check_imports(tree)
    else:
        source = text_of(title)
        for line in code.splitlines():
            assert line.strip() in source, line


def check_imports(tree):
    """Check that the code's imports from this project exist; modules that need an extra are read, not imported."""
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.ImportFrom) or not (statement.module or "").startswith(
            "relibra_jax"
        ):
            continue
        spec = importlib.util.find_spec(statement.module)
        assert spec, statement.module
        source = Path(spec.origin).read_text()
        for alias in statement.names:
            assert re.search(rf"\b{alias.name}\b", source), f"{statement.module}.{alias.name}"


def commands(page):
    """Yield the commands of a page's shell blocks as words, without environment variables set before them."""
    for _, code in blocks(page, "bash", "sh"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for start, word in enumerate(words):
                if word in ("relibra", "make") or (
                    word == "python" and words[start + 1 : start + 2] == ["-m"]
                ):
                    yield words[start:]
                    break


COMMANDS_OF_PAGES = sorted({tuple(words) for page in PAGES for words in commands(page)})


@pytest.mark.parametrize("words", COMMANDS_OF_PAGES, ids=" ".join)
def test_commands_accept_the_arguments_of_pages(words, monkeypatch):
    match words:
        case ("make", *targets):
            makefile = text_of("Makefile")
            for target in targets:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        case ("relibra", *args):
            check_options(COMMANDS, args, monkeypatch)
        case ("python", "-m", "experiments.run", "--list"):
            pass
        case ("python", "-m", "experiments.run", name, *args):
            monkeypatch.setattr("experiments.run.saved_config", lambda folder: Train())
            with contextlib.suppress(SystemExit):  # --help
                parse_runs(read_config(name), own_options([STAND_INS.get(word, word) for word in args]))
        case ("python", "-m", module, *args):
            check_flags(module, args)


def check_options(table, args, monkeypatch):
    """Check that the command line of ``relibra`` can be parsed, without running the command."""
    parsed = []
    for name, (options, _) in list(table.items()):
        monkeypatch.setitem(table, name, (options, lambda options, console: parsed.append(options)))
    assert main(args) == 0
    assert len(parsed) == 1


def check_flags(module, args):
    """Check that the program exists, and that its package names every option."""
    spec = importlib.util.find_spec(module)
    assert spec, module
    path = Path(spec.origin)
    sources = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
    text = "\n".join(source.read_text() for source in sources)
    for flag in (word.removeprefix("--") for word in args if word.startswith("--")):
        name = flag.removeprefix("no-").replace("-", "_")  # --no-x switches the setting x off
        assert re.search(rf"\b{name}\b|--{flag}\b", text), f"{module} --{flag}"


def test_extras_that_pages_install_exist():
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r"pip install [^\n]*\[([a-z]+)\]", text_of(page))}
    assert named
    assert named <= extras.keys()


CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(path):
    """Return the anchors of a page's headings, as code hosts and the site make them."""
    if path.suffix != ".md":
        return set()
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue  # another site, which cannot be reached without a network
        file, _, anchor = target.partition("#")
        path = Path(os.path.normpath((ROOT / page).parent / file)) if file else ROOT / page
        if path.parent.name == "notebooks" and path.suffix == ".md":
            path = path.with_suffix(".ipynb")
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_glossary_is_that_of_the_types():
    of_types = types.__doc__.partition("Glossary")[2].partition("Dimensions")[0]
    words = re.findall(r"^([a-z][a-z, -]*?)  +\S", of_types, re.MULTILINE)
    assert len(words) > 10
    page = text_of("docs/concepts/glossary.md")
    for word in words:
        assert re.search(rf"^\| \*\*.*{word.split(',')[0]}.*\*\* \|", page, re.MULTILINE), word
