"""MkDocs hook: run every notebook of docs/ and show it with its outputs.

Notebooks are kept without outputs. ``mkdocs build`` runs them, so a page shows what the library does today, and an
error in a cell ends the build. ``mkdocs serve`` shows the cells alone, because it builds after every change.
"""

import base64
import os
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 300
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),  # a second build finds its programs compiled
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # notebooks compile much and compute little
}

run_notebooks = True


def on_startup(command: str, dirty: bool) -> None:
    """Note whether the site is built or served."""
    global run_notebooks
    run_notebooks = command == "build"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every notebook, and the figures that it draws; the notebook itself stays, to be downloaded."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = nbformat.read(file.abs_src_path, as_version=4)
        if run_notebooks:
            client = NotebookClient(
                notebook,
                timeout=TIMEOUT_SECONDS,
                resources={"metadata": {"path": str(ROOT)}},
                config=Config(KernelManager={"transport": "ipc"}),
            )
            client.execute(env={**os.environ, **ENVIRONMENT})
        name = file.src_uri.removesuffix(".ipynb")
        text, figures = page_of(notebook, Path(name).name)
        files.append(File.generated(config, f"{name}.md", content=text))
        for number, figure in enumerate(figures):
            files.append(File.generated(config, f"{name}-{number}.png", content=figure))
    return files


def page_of(notebook: nbformat.NotebookNode, name: str) -> tuple[str, list[bytes]]:
    """A notebook as Markdown, and its figures."""
    parts: list[str] = []
    figures: list[bytes] = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stdout")
        texts = [printed] if printed else []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![Output of the cell above]({name}-{len(figures)}.png)")
                figures.append(base64.b64decode(data["image/png"]))
            elif "text/plain" in data:
                texts.append(data["text/plain"])
        parts += [f"```text\n{text.rstrip()}\n```" for text in texts]
    title, *rest = parts
    download = f"[Download this notebook]({name}.ipynb) and run it in the root of the repository."
    return "\n\n".join([title, download, *rest]) + "\n", figures
