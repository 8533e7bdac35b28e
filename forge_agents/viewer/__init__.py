"""Look at runs in a browser: ``forge-agents view RUN``.

In: folders that training runs and benchmarks wrote, also while they do. Out: a page on loopback until Ctrl-C
(`serve_page`), or one HTML file (`save_page`). Waits for the browser's requests and the disk; writes nothing but its
index, in the cache folder.

Start reading in `runs`: what the page shows of a folder. `index` finds episodes among 100,000, `episodes` says what is
shown of one, `server` answers the browser, `page` has its files and writes them as one. The page itself is in
``static/``: ``app.js`` first, then a module for each tab; ``static/vendor/`` holds the one library, with its licence.
"""

from forge_agents.viewer.page import save_page
from forge_agents.viewer.server import serve_page

__all__ = ["save_page", "serve_page"]
