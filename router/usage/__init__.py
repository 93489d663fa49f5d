"""Usage of tenants: tokens by day, tenant and model, in a ledger that a client's receipts never run ahead of.

| file | what |
| --- | --- |
| `totals.py` | entries, and their sums. Pure |
| `ledger.py` | the ledgers: in memory only, or also in a file |
| `redis_ledger.py` | the ledger of all routers, as a Redis stream with sums |
| `config.py` | the settings |
"""
