"""What the requests of one model used and cost, in plain counters."""

from protos import inference_pb2 as pb
from router.models.config import ModelEntry


class Costs:
    """Since the router started."""

    def __init__(self, entry: ModelEntry) -> None:
        self.prices = _prices(entry)
        """For a million tokens; None where none are set."""
        self.num_requests = 0
        """That had at least one message."""
        self.num_unfinished = 0
        """Of these: cancelled, or failed in the end."""
        self.num_auto = 0
        """And those that did not name it: it was chosen."""
        self.input_tokens = 0
        self.output_tokens = 0
        self.price = 0.0
        """Of all of them, at the prices set."""

    @property
    def input_price(self) -> float:
        """For one token; 0 where none is set."""
        return self.prices.input_per_million / 1e6 if self.prices else 0.0

    @property
    def output_price(self) -> float:
        return self.prices.output_per_million / 1e6 if self.prices else 0.0

    def used(self, input_tokens: int, output_tokens: int, finished: bool, auto: bool) -> None:
        """By one request, once it is over."""
        self.num_requests += 1
        self.num_unfinished += not finished
        self.num_auto += auto
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        self.price += input_tokens * self.input_price + output_tokens * self.output_price


def _prices(entry: ModelEntry) -> pb.Price | None:
    if entry.input_price is None or entry.output_price is None:
        return None
    return pb.Price(input_per_million=entry.input_price, output_per_million=entry.output_price)
