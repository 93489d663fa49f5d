"""Load of a drill: waves of greedy streams whose answers are known."""

import random
import secrets
import time
from dataclasses import dataclass, field

from cluster.errors import InvalidRequest, ServiceError
from cluster.process.tasks import all_of
from protos import inference_pb2 as pb
from tandem.client import Client
from tandem.loadgen.frontends import LEAST_TOKEN

STREAM_S = 120.0
"""Seconds after which a stream counts as lost."""


@dataclass(frozen=True, slots=True)
class LoadSize:
    """Size of a wave."""

    streams: int = 8
    prompt_tokens: int = 512
    output_tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("streams", "prompt_tokens", "output_tokens"):
            if (value := getattr(self, name)) < 1:
                raise InvalidRequest(name, f"must be at least 1, not {value}")


@dataclass(slots=True)
class DrillReply:
    """Answer of one stream, as far as it came."""

    token_ids: list[int] = field(default_factory=list)
    error: ServiceError | None = None
    """Error with which the stream was lost."""
    ttft_s: float = 0.0
    total_s: float = 0.0
    receipt: pb.Receipt = field(default_factory=pb.Receipt)

    @property
    def is_undisturbed(self) -> bool:
        """Whether it ended well at its first placement, with all blocks that were lent to it."""
        kv = self.receipt.kv
        is_whole = not (kv.loan_failure or kv.mismatched_blocks or kv.hedged_blocks)
        return self.error is None and self.receipt.placement.attempt == 1 and is_whole


class DrillLoad:
    """Waves of the same prompts, each wave with a cache of its own, so that every wave computes and moves its KV."""

    def __init__(self, client: Client, served: pb.Model, size: LoadSize, seed: int) -> None:
        """Create the prompts.

        Raises InvalidRequest where they are longer than the model's context.
        """
        longest = served.max_context_tokens - size.output_tokens
        if size.prompt_tokens > longest:
            raise InvalidRequest("prompt_tokens", f"must be at most {longest} here, not {size.prompt_tokens}")
        rng = random.Random(seed)
        tokens = range(min(LEAST_TOKEN, served.vocab_size // 2), served.vocab_size)
        self._prompts = [rng.choices(tokens, k=size.prompt_tokens) for _ in range(size.streams)]
        self._client = client
        self._model = served.name
        self._sampling = pb.Sampling(max_tokens=size.output_tokens, temperature=0, ignore_eos=True)

    async def wave(self) -> list[DrillReply]:
        """Run one stream of each prompt, all at once; an error is part of its stream's answer."""
        salt = f"drill-{secrets.token_hex(8)}"
        return await all_of(self._stream(prompt, salt) for prompt in self._prompts)

    async def _stream(self, prompt: list[int], salt: str) -> DrillReply:
        answer, began_at = DrillReply(), time.monotonic()
        try:
            async for message in self._client.generate(
                token_ids=prompt, sampling=self._sampling, model=self._model, cache_salt=salt, timeout_s=STREAM_S
            ):
                answer.ttft_s = answer.ttft_s or time.monotonic() - began_at
                answer.token_ids += message.token_ids
                if message.HasField("finish"):
                    answer.receipt = message.finish.receipt
        except ServiceError as error:
            answer.error = error
        answer.total_s = time.monotonic() - began_at
        return answer
