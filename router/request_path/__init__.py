"""The path of one request through the router, from validation to the stream from its decode worker."""
