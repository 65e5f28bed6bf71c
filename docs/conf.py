"""Sphinx's settings of the documentation site: `make docs` builds it into out/docs."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyXRefRole

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gradengine import __version__  # noqa: E402

project = "gradengine"
author = "The gradengine authors"
copyright = f"2026, {author}"  # noqa: A001
version = release = __version__
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"gradengine {release}"
html_theme_options = {"source_repository": URLS["Source"], "source_branch": "main", "source_directory": "docs/"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
smartquotes = False  # they make a dash of `--option`

# Docstrings are Google's form. Frameworks need not be installed to read them.
autodoc_mock_imports = ["cupy", "jax", "lightning", "mpi4py", "optax", "torch", "transformers", "accelerate"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "name"


def name_role(name, rawtext, text, lineno, inliner, options=None, content=None):  # type: ignore[no-untyped-def]
    """Return a link for single backticks around a whole name, such as `GradientEngine.step`, and code for the rest."""
    if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", text):
        return PyXRefRole()("py:obj", rawtext, text, lineno, inliner, options or {}, content or [])
    return [nodes.literal(rawtext, text)], []


def add_commands(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the help of each command to the page of commands."""
    if docname == "reference/commands":
        command = [sys.executable, "-m", "typer", "gradengine.commands.cli", "utils", "docs", "--name", "gradengine"]
        help_texts = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        source[0] += help_texts[help_texts.index("\n## ") :]


def link_sources(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn links to files outside of docs/ into links to the repository, since the site has no such pages."""
    source[0] = linked(source[0], ROOT / "docs" / docname, ROOT / "docs" / docname)


def link_included(app: Sphinx, included: Path, docname: str, source: list[str]) -> None:
    """Make the links of README.md, CONTRIBUTING.md and CHANGELOG.md relative to the page that includes them."""
    # MyST passes the last part of the page's name alone.
    source[0] = linked(source[0], ROOT / included.name, ROOT / "docs" / app.env.docname)


def linked(text: str, file: Path, page: Path) -> str:
    """Return the text of a file with links that work on a page of the site."""

    def link(match: re.Match[str]) -> str:
        path = (file.parent / match[1]).resolve()
        if not path.exists():
            return match[0]
        if path.is_relative_to(ROOT / "docs"):
            return f"]({os.path.relpath(path, page.parent)}{match[2] or ''})"
        return f"]({URLS['Source']}/blob/main/{path.relative_to(ROOT)}{match[2] or ''})"

    return re.sub(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)", link, text)


def setup(app: Sphinx) -> None:
    """Register the role of single backticks and what is done to pages as they are read."""
    app.add_role("name", name_role)
    app.connect("source-read", link_sources)
    app.connect("include-read", link_included)
    app.connect("source-read", add_commands)
