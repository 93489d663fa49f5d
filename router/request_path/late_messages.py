"""Messages of one request that came while its client was served late: joined, they cost the rest of the way once."""

from collections.abc import Sequence

from protos import inference_pb2 as pb


def joined(messages: Sequence[bytes]) -> Sequence[pb.GenerateResponse]:
    """Return the GenerateResponses of serialised ones, in their order; neighbours of one choice become one message."""
    first = pb.GenerateResponse.FromString(messages[0])
    if len(messages) == 1:
        return (first,)
    result = [first]
    for raw in messages[1:]:
        message, last = pb.GenerateResponse.FromString(raw), result[-1]
        if last.index == message.index and not last.HasField("finish") and all(map(_has_only_output, (last, message))):
            text = last.text + message.text
            last.MergeFrom(message)
            last.text = text
        else:
            result.append(message)
    return result


def _has_only_output(message: pb.GenerateResponse) -> bool:
    """Return whether a message can be continued: prompts' probabilities and embeddings are messages of their own."""
    return not (message.prompt_logprobs or message.embedding)
