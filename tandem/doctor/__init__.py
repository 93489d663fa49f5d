"""`tandem doctor`: checks of a host before any request: packages, limits, devices, and KV transfers between workers."""
