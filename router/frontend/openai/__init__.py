"""The OpenAI-compatible HTTP API in the router's process: /v1/completions, /v1/chat/completions, /v1/models.

| file | what |
| --- | --- |
| `app.py`, `server.py` | paths; uvicorn in the router's event loop, limits of a request's head |
| `endpoint.py`, `exchange.py`, `merging.py`, `connection.py` | one request: body, generation, answer, disconnects |
| `fields.py`, `sampling.py`, `request.py`, `completions.py`, `chat.py` | from a body to GenerateRequests. Pure |
| `answers.py`, `choice.py`, `logprobs.py` | from messages to chunks, or the whole answer. Pure |
| `tool_calls.py`, `forced_calls.py` | tool calls in a text, and the grammar of a forced one. Pure |
| `caller.py`, `errors.py` | the caller's identity; the form of errors |

Fields that OpenAI's clients send and that change no answer are accepted (`fields.HARMLESS`). Any other unsupported
field is refused by name, unless its value asks for the default (`fields.NEUTRAL`). The manual: docs/openai.md.
"""
