"""Viewer of runs and benchmarks in a browser (``forge-agents view``): a local server or one HTML file.

`runs` reads a folder, `index` finds episodes among 100,000, `episodes` prepares one of them, `server` answers the
browser, and `page` writes a single file. The page is in ``static/``: ``app.js``, a module per tab, and one library in
``static/vendor/`` with its license. Run folders are never changed. The index is a temporary file.
"""

from forge_agents.viewer.page import save_page
from forge_agents.viewer.server import serve_page

__all__ = ["save_page", "serve_page"]
