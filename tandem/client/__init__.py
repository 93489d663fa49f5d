"""The Python client: `Client` is asynchronous, `SyncClient` waits. Both speak gRPC to any of several routers."""

from tandem.client.call_span import Metadata
from tandem.client.client import Client, Message, Target, error_of
from tandem.client.sync_client import SyncClient

__all__ = ["Client", "Message", "Metadata", "SyncClient", "Target", "error_of"]
