"""The playground: a web page on a running server, to try its tasks by hand.

    with Playground(Served("http://127.0.0.1:8000"), port=0) as page:
        page.serve()                # until `close`, at page.url

`served.py` asks the one Triton server behind the page, `server.py` hands the page and the answers to a browser, and
`page/` is what the browser shows: no content from other hosts, no build step.
"""

from serving.playground.served import Served
from serving.playground.server import Playground

__all__ = ["Playground", "Served"]
