"""Both sides of a loan: pure state machines (`borrower.py`, `lender.py`), and managers that perform their actions."""
