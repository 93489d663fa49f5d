"""The OpenAI-compatible HTTP API, within the router's process: /v1/completions, /v1/chat/completions, /v1/models.

| file | what |
| --- | --- |
| `app.py`, `server.py` | paths; uvicorn in the router's event loop, limits of a request's head |
| `endpoint.py`, `exchange.py`, `merging.py` | one request: body, generation, answer, its client's leaving |
| `fields.py`, `sampling.py`, `request.py`, `completions.py`, `chat.py` | from a body to our GenerateRequests. Pure |
| `answers.py`, `choice.py`, `logprobs.py` | from our messages to chunks, or the whole answer. Pure |
| `tool_calls.py`, `forced_calls.py` | calls of tools in a text, and the grammar of one that must be made. Pure |
| `caller.py`, `errors.py` | who asks; what an error looks like |

Fields that OpenAI's clients send and that change no answer are accepted (`fields.HARMLESS`); any other that is not
supported is refused, naming it, unless it asks for what is done anyway (`fields.NEUTRAL`). The manual: docs/openai.md.
"""
