"""Workers that have joined the router: the Membership service and the cluster status."""
