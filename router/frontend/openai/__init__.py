"""The OpenAI-compatible HTTP API in the router's process: /v1/completions, /v1/chat/completions, /v1/models.

| file | what |
| --- | --- |
| `sampling.py`, `request.py`, `completions.py`, `chat.py` | from a body to GenerateRequests. Pure |
| `answers.py`, `choice.py`, `logprobs.py`, `tokens.py` | from messages to chunks, or the whole answer. Pure |
| `tool_choice.py` | `tool_choice` and `tools` of any of the APIs. Pure |
| `responses/` | the Responses API, with stored conversations |
| `embeddings.py` | embeddings and scores |

Fields that OpenAI's clients send and that change no answer are accepted (`http/body/fields.py`: HARMLESS). Any other
unsupported field is refused by name, unless its value asks for the default (NEUTRAL). The manual: docs/openai.md.
"""
