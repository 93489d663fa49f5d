"""Settings of the usage ledger."""

from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from cluster.config import Config


class UsageSettings(Config):
    """Settings of the usage ledger."""

    usage_file: Path | None = None
    """File of this router's usage ledger, to which a line per request is appended before its client has the receipt.
    Unset: usage is known since the router's start only, unless `usage_in_redis`."""
    usage_in_redis: bool = False
    """Whether all routers of the cluster keep one usage ledger, as a stream in `redis_url`."""
    usage_days: int = Field(default=35, ge=1, le=1000)
    """Days whose usage `GET /v1/usage` knows."""

    @field_validator("usage_in_redis")
    @classmethod
    def _one_ledger(cls, in_redis: bool, info: ValidationInfo) -> bool:
        if in_redis and info.data.get("usage_file") is not None:
            raise ValueError("cannot be combined with usage_file: Redis holds the ledger of all routers")
        return in_redis
