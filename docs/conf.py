"""How Sphinx builds the documentation: `make docs`."""

project = "SPR"
author = "the authors of SPR in PyTorch"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["examples/**"]
html_theme = "furo"
html_title = "SPR"
highlight_language = "none"
nitpicky = True
