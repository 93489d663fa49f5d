"""Endpoint picker of Gateway API's InferencePool: Envoy's external processing, answered with the router's placement.

service.py     the gRPC service
exchange.py    one HTTP exchange: Envoy's messages in, answers and events out (pure)
picker.py      from a request to its placed server, by the router's own admission and `place`
learning.py    what answers tell placement (pure)
lender.py      the lender in a request's body (pure)
"""
