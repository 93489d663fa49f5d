"""Who may come in: quotas of tenants, and how many tokens each has used."""
