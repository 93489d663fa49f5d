"""Batches of requests from files, as OpenAI's Batch API has them, which survive the death of any router.

| file | what |
| --- | --- |
| `records.py`, `state.py` | what is recorded of a batch; its status and next step by the records. Pure |
| `lines/` | a line and its answer; faults of an input; retries; the output files, made of the answers at the end |
| `storage/` | file system calls that survive a crash; files and batches of all tenants; answers, synced as they come |
| `claims/` | which router runs a batch |
| `pace.py`, `threads.py` | long work beside other requests |
| `run.py`, `runner.py` | one batch from step to step; all batches of a router |
| `service.py`, `config.py` | all of this together; settings |

**Every line is answered once.** A line is answered when its answer is synced in a log of the batch. Each router that
takes a batch up reads all logs, skips answered lines, and writes a log of its own, so a torn last line harms nothing.
Every record is written once and whole: of two routers that believe to have a batch, the first to record a step decides
it for both. The outputs are a pure function of the input and of those parts of the logs that the record names.

HTTP is in `router/frontend/openai_files/`. The manual: docs/openai.md.
"""
