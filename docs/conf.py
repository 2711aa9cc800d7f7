# How Sphinx turns the pages into a site; `make docs` calls it (docs/site.sh).

import re

project = "galloc"
version = release = re.search(r'GALLOC_VERSION_STRING "(.*)"', open("../galloc.h").read())[1]

extensions = ["myst_parser"]
myst_heading_anchors = 4  # as GitHub makes them
myst_number_code_blocks = []
exclude_patterns = []
# Fragments of C with a kernel launch, and what a program prints.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"galloc {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
