"""Lines of a batch: inputs, retries, answers, and the files made of them."""
