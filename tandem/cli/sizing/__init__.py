"""Commands that size a cluster, and that measure one."""
