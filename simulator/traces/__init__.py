"""Traces of requests: who asks for how much, when, and what prompts share.

    reading.py    opens a file, finds out its format, and gives TraceRequests one after another, in order of time
    row.py        what is checked in every format
    mooncake.py   JSON lines: timestamp, input_length, output_length, hash_ids
    azure.py      CSV: TIMESTAMP, ContextTokens, GeneratedTokens
    receipts.py   our own: JSON lines of what receipts say; its writer too

A trace is read as a stream: of a file of any size a line, and what `spread` looks ahead, is in memory. A line that is
not what its format says is a BadTrace with its number. Lines must be in order of time.
"""
