"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

| file | what |
| --- | --- |
| `messages.py` | from a body to a GenerateRequest. Pure |
| `answer.py` | from messages to events, or the whole answer; the form of errors; the path that counts tokens |

The manual: docs/anthropic.md.
"""
