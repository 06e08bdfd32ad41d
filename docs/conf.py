"""The site of docs/: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from launcher import __version__  # noqa: E402

project = "Megatron Launchpad"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["README.md"]  # which index.rst includes
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
