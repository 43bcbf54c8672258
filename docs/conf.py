"""Settings of Sphinx: `make docs` builds the guides and the API as one site."""

import towers

project = "towers"
version = release = towers.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "benchmarks/**", "findings/*.md"]
# Links to headings, as GitHub names them.
myst_heading_anchors = 4
autodoc_member_order = "bysource"
napoleon_use_ivar = True
# A name in backticks is code in our docstrings.
default_role = "code"
html_theme = "furo"
