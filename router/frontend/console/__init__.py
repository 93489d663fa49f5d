"""A web page of the router: the pools live, the links between them, and where the time of requests went.

`page.html` is all of it: no build step, nothing from elsewhere. It asks `routes.py` for the status of the cluster and
for the last requests, which `router/observability/recent_requests.py` keeps. No prompt and no output is ever there.
"""
