"""Requests of pages in browsers: preflights are answered, and answers say which pages may read them."""

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

READABLE = ("x-request-id", "x-tandem-ignored", "retry-after", "retry-after-ms")
"""Headers of answers that a page's script may read."""
PREFLIGHT_S = 600
"""Seconds for which browsers keep the answer to a preflight."""


def open_to_pages(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Wrap the application, keys included, for pages of these origins; without any it stays as it is.

    Preflights need no key: browsers send none with them.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("*",),
        allow_headers=("*",),
        expose_headers=READABLE,
        allow_private_network=True,
        max_age=PREFLIGHT_S,
    )
