"""The OpenAI-compatible HTTP API in the router's process: /v1/completions, /v1/chat/completions, /v1/models.

| file | what |
| --- | --- |
| `request.py`, `completions.py`, `chat.py` | from a body, with its tools, to GenerateRequests. Pure |
| `answers.py`, `completions.py`, `tokens.py` | from messages to chunks, or the whole answer. Pure |
| `responses/` | the Responses API, with stored conversations |
| `embeddings.py` | embeddings and scores |

Fields that nobody reads are ignored and named, unless their loss would change the answer (`http/body/fields.py`:
REFUSED). The manual: docs/openai.md.
"""
