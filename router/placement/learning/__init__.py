"""What receipts teach: speeds, lengths of outputs, and the quality of predictions."""
