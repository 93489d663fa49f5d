"""Loans from the store that workers share."""
