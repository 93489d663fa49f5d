"""The Python client: `Client` is asynchronous, `SyncClient` waits. Both speak gRPC to any of several routers.

Requests and answers are protobuf's messages, described in docs/grpc.md; errors are in `tandem.errors`.
"""

from cluster.network.tls import ClientIdentity
from protos.inference_pb2 import (
    BatchResult,
    ChatMessage,
    Explanation,
    Finish,
    GenerateRequest,
    Model,
    OutputPart,
    Receipt,
    Sampling,
    StructuredOutput,
    TokenLogprobs,
    ToolCall,
    Usage,
    UsageTotal,
    WarmResponse,
)
from protos.inference_pb2 import GenerateResponse as Piece
from tandem.client.call_span import Metadata
from tandem.client.client import Client, Target, error_of
from tandem.client.options import (
    EmbedOptions,
    GenerateOptions,
    Medium,
    Message,
    Part,
    PromptOptions,
    TokenizeOptions,
    WarmOptions,
)
from tandem.client.sync_client import SyncClient

__all__ = [
    "BatchResult",
    "ChatMessage",
    "Client",
    "ClientIdentity",
    "EmbedOptions",
    "Explanation",
    "Finish",
    "GenerateOptions",
    "GenerateRequest",
    "Medium",
    "Message",
    "Metadata",
    "Model",
    "OutputPart",
    "Part",
    "Piece",
    "PromptOptions",
    "Receipt",
    "Sampling",
    "StructuredOutput",
    "SyncClient",
    "Target",
    "TokenLogprobs",
    "TokenizeOptions",
    "ToolCall",
    "Usage",
    "UsageTotal",
    "WarmOptions",
    "WarmResponse",
    "error_of",
]
