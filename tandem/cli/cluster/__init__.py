"""Commands that start a cluster, and change a running one."""
