"""The embedding that a client gets, from an engine's pooled hidden state."""

import numpy as np

from cluster.errors import ServiceError
from protos import decode_pb2 as pb


def finished_embedding(vector: bytes, wanted: pb.Embedding) -> list[float]:
    """Return the wanted dimensions of a float32 vector, scaled to length 1 where wanted.

    Raises ServiceError for a vector that is no embedding, such as one of overflowed numbers.
    """
    values = np.frombuffer(vector, np.float32)
    if not np.isfinite(values).all():
        raise ServiceError("the model's hidden state has numbers that are not finite")
    if wanted.dimensions:
        values = values[: wanted.dimensions]
    if wanted.normalize:
        length = float(np.linalg.norm(values))
        if not length:
            raise ServiceError("the model's hidden state is zero and has no direction")
        values = values / np.float32(length)
    kept: list[float] = values.tolist()
    return kept
