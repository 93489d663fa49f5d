"""OpenAI's Files and Batches at the router's port, all of which the process of files and batches answers.

| file | what |
| --- | --- |
| `routes.py` | calls of /v1/files and /v1/batches, passed on with the caller's identity |
| `media_files.py` | files that requests name as pictures, read there |
| `lines.py` | lines of batches, which come from there |

What crosses is in `batches/__init__.py`. The manual: docs/openai.md.
"""
