"""The console: a web page with live pools, links between workers, and where the time of requests went.

`page.html` is all of it: no build step, no external resource. It polls `routes.py` for the cluster's status and the
last requests, which `router/observability/records.py` keeps. It never shows texts of prompts or outputs. It
shows thumbnails of a prompt's pictures where records keep texts.
"""
