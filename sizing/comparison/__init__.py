"""Comparison of clusters by one trace: replay, results, advice and display."""
