"""MkDocs hook: pages may link to any file of the repository by its path, as they do where the repository is read.

A file outside docs/ to which a page links becomes part of the site, without a copy of it in git. Markdown and source
files become pages, a folder a page that lists it, and other files stay as they are. The hook rewrites the links.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "experiments/results/README.md": "evidence/results.md",
    "experiments/results/claims/claims.md": "evidence/claims.md",
    "experiments/results/kernels/gpu.md": "evidence/gpu-kernels.md",
}
"""Pages of the site whose source is outside docs/, and files whose place a page of docs/ takes."""

SOURCES = {".py": "python", ".toml": "toml", ".txt": "text", "": "make"}
"""The language of the files that are shown as a page."""

LINK = re.compile(r"```.*?```|`[^`\n]*`|(?<=\]\()(?P<target>[^)\s:#]+)(?=[)#])", re.DOTALL)
"""The target of a link to a file. Code is matched first, so that nothing in it is taken for a link."""


def place_of(path: str) -> str:
    """Where the site has a file or folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"files/{path}/index.md"
    return f"files/{path}.md" if Path(path).suffix in SOURCES else f"files/{path}"


def source_of(place: str) -> str:
    """The file or folder of the repository from which a page of the site comes."""
    sources = {PAGES[path]: path for path in PAGES if path != "README.md"}
    if place in sources:
        return sources[place]
    if place.startswith("files/"):
        path = place.removeprefix("files/").removesuffix("/index.md")
        return path if (ROOT / path).exists() else path.removesuffix(".md")
    return f"docs/{place}"


def linked_paths(text: str, source: str) -> list[str]:
    """The existing files and folders of the repository to which a page's text links."""
    folder = source if (ROOT / source).is_dir() else posixpath.dirname(source)
    targets = [match["target"] for match in LINK.finditer(text) if match["target"]]
    paths = [posixpath.normpath(posixpath.join(folder, target)) for target in targets]
    return [path for path in paths if (ROOT / path).exists() and not path.startswith("..")]


def text_of(path: str) -> str | None:
    """The Markdown of a page for a file or folder outside docs/; None where the file is not shown as a page."""
    source = ROOT / path
    hidden = "---\nsearch:\n  exclude: true\n---\n\n"
    if source.is_dir():
        names = sorted(
            f"{entry.name}{'/' * entry.is_dir()}" for entry in source.iterdir() if entry.name[0] not in "._"
        )
        return f"{hidden}# {path}\n\n" + "\n".join(f"- [{name}]({name.rstrip('/')})" for name in names) + "\n"
    if source.suffix == ".md":
        return source.read_text() if path in PAGES else hidden + source.read_text()
    if source.suffix in SOURCES:
        return f"{hidden}# {path}\n\n````{SOURCES[source.suffix]}\n{source.read_text()}\n````\n"
    return None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that come from outside docs/, and whatever any page links to."""
    paths = [path for path in PAGES if path != "README.md"]
    for file in files.documentation_pages():
        paths += linked_paths(file.content_string, f"docs/{file.src_uri}")
    while paths:
        path = paths.pop()
        if path.startswith("docs/") or files.get_file_from_path(place_of(path)):
            continue
        text = text_of(path)
        if text is None:
            files.append(File.generated(config, place_of(path), abs_src_path=str(ROOT / path)))
        else:
            files.append(File.generated(config, place_of(path), content=text))
        paths += linked_paths(text or "", path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where the site has the files."""
    here = page.file.src_uri
    source = source_of(here)
    folder = source if (ROOT / source).is_dir() else posixpath.dirname(source)

    def moved(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["target"] or ""))
        if not match["target"] or not (ROOT / path).exists():
            return match[0]  # code; or a page that has no file, or a link that is broken: strict mode says so
        return posixpath.relpath(place_of(path), posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would load anything from the network."""
    loaded = re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"?(?:https?:)?//[^\s\">]+", output)
    loaded += re.findall(r"<link[^>]+rel=\"?stylesheet[^>]+href=\"?(?:https?:)?//[^\s\">]+", output)
    if loaded:
        raise ValueError(f"{page.file.src_uri} loads from the network: {', '.join(loaded)}")
    return output
