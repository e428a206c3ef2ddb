"""Settings of the documentation site: ``make docs``. Nothing here asks a network."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Sphinx runs this file from anywhere; `docs` and `asyncflow` are found from the root of the checkout.
sys.path.insert(0, str(ROOT))

from docs import site_gallery, site_pages  # noqa: E402

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

project = "asyncflow"
author = "the asyncflow authors"
release = version = _PROJECT["version"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "docs.site_pages",
]
# Data of runs on cards, and what Sphinx itself writes.
exclude_patterns = ["_build", "gpu/20*", "generated/examples", "generated/gallery/*.py"]
suppress_warnings = ["config.cache"]

html_theme = "furo"
html_title = f"asyncflow {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
# Quotes stay as written: those before a year, as in '18, would open.
smartquotes = False
pygments_style = "default"
pygments_dark_style = "monokai"

# Headings have GitHub's anchors, so that links work there and here.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_display_short_literal_types = True
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [(site_pages.RAISES.removesuffix(":"), "params_style")]
# Docstrings have code in single backticks.
default_role = "literal"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Inventories are part of the checkout (`docs/inventories`): a build without a network makes the same pages.
intersphinx_mapping = site_pages.INVENTORIES

sphinx_gallery_conf = site_gallery.settings(runs=os.environ.get("ASYNCFLOW_DOCS_RUN", "1") != "0")
