"""OpenAI's Files and Batches over HTTP: /v1/files and /v1/batches.

| file | what |
| --- | --- |
| `routes.py` | the paths: who may do what |
| `upload.py` | a multipart form, streamed to disk |
| `reading.py`, `reading.py` | from fields to what is asked for; from records to OpenAI's objects. Pure |
"""
