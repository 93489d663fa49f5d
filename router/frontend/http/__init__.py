"""The router's HTTP server, and what all of its APIs share.

The APIs' own packages read bodies and make answers.

| file | what |
| --- | --- |
| `server.py` | uvicorn in the router's event loop, limits of a request's head, keys, CORS |
| `exchange.py`, `endpoint.py` | one request: body, generation, answer, disconnects |
| `generation.py` | a request as it was read, and the maker of its answer. Pure |
| `body/` | compressed bodies, reading of JSON field by field, media |
| `errors.py` | the caller's identity; the form of errors |

`router/frontend/http_app.py` joins the APIs.
"""
