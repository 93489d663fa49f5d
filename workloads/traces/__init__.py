"""Traces of requests: arrival times, lengths, and shared prefixes of prompts.

    reading.py    opens a file, detects its format, and yields TraceRequests in order of time
    row.py        checks common to all formats
    mooncake.py   JSON lines: timestamp, input_length, output_length, hash_ids
    columns.py    columns of a CSV or of JSON objects: Azure's, BurstGPT's, logs of gateways, spans, and named ones
    receipts.py   Tandem's own: JSON lines of receipts; its writer too

A trace of any size is read as a stream: one line, and the look-ahead of `spread`, are in memory. A malformed line is a
BadTrace with its number. Lines must be in order of time; only those of logs are sorted, in memory.
"""
