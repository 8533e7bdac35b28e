"""An application served in a thread of this process."""

import contextlib
import socket
import threading

import uvicorn
from process_checks import holds_within


@contextlib.contextmanager
def served(app, **settings):
    """The address of the application on loopback, as long as the block lasts. `settings` are uvicorn's."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(app, **{"log_level": "error", **settings}))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            assert holds_within(60, lambda: running.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join(timeout=60)
