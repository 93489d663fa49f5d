"""`make bench-neighbours`: a tenant within its limits, beside another one that attacks."""
