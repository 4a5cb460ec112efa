"""Sphinx over the Markdown of the whole checkout, so that one relative link works here and on GitHub: `make docs`."""

import re

from sphinx.application import Sphinx

from eagle_kernels import __version__

project = "eagle-kernels"
author = "the eagle-kernels authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/*.md", "examples/*/README.md"]
exclude_patterns = [".venv*", "build", "csrc", "tests"]

myst_heading_anchors = 3  # links to headings, checked like all others
html_theme = "furo"
html_title = f"eagle-kernels {release}"
html_extra_path = ["index.html"]  # the site starts at the README

smartquotes = False  # docstrings have -- and ... of their own
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_maximum_signature_line_length = 100


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", as_plain_text, priority=400)  # before napoleon, which writes markup


def as_plain_text(app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text, where reStructuredText takes [*ids.shape] for emphasis and `K.` for a list."""
    lines[:] = [re.sub(r"\b([A-Z])\.$", r"\1\.", line).replace("*", r"\*").replace("`", "``") for line in lines]
