"""Resources of the host that engines share: CPU cores and main memory."""
