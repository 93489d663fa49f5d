"""OpenAI's Files and Batches over HTTP: /v1/files and /v1/batches.

| file | what |
| --- | --- |
| `routes.py` | the paths: who may do what |
| `upload.py` | a multipart form, streamed to disk |
| `reading.py`, `objects.py` | from fields to what is asked for; from records to OpenAI's objects. Pure |
| `lines.py` | lines of batches, answered by the HTTP endpoints themselves |

What a batch is, and how it survives, is in `router/batches/`. The manual: docs/openai.md.
"""
