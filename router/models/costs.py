"""Usage and cost of one model's requests, as plain counters."""

from protos import inference_pb2 as pb
from router.models.config import ModelEntry


class Costs:
    """Counters since the router started."""

    def __init__(self, entry: ModelEntry) -> None:
        self.prices = _prices(entry)
        """Prices of a million tokens; None where none are set."""
        self.num_requests = 0
        """Requests with at least one message."""
        self.input_tokens = 0
        self.output_tokens = 0

    @property
    def input_price(self) -> float:
        """Price of one prompt token; 0 where none is set."""
        return self.prices.input_per_million / 1e6 if self.prices else 0.0

    @property
    def output_price(self) -> float:
        return self.prices.output_per_million / 1e6 if self.prices else 0.0

    def used(self, input_tokens: int, output_tokens: int) -> None:
        """Count a request that is over."""
        self.num_requests += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens


def _prices(entry: ModelEntry) -> pb.Price | None:
    if entry.input_price is None or entry.output_price is None:
        return None
    return pb.Price(input_per_million=entry.input_price, output_per_million=entry.output_price)
