"""Connection to Redis: Lua scripts only, each with a time limit, and typed failures.

No message here contains the URL, which may hold a password.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)

from cluster.errors import StartError, TandemError

log = logging.getLogger(__name__)

PASSWORD_VARIABLE = "TANDEM_REDIS_PASSWORD"
"""Environment variable with the password of a `redis_url` that has none; other users can read a command line."""
MAX_CONNECTIONS = 4
_SCHEMES = ("redis://", "rediss://", "unix://")


class RedisFailure(TandemError):
    """A Redis call that failed."""


class RedisAway(RedisFailure):
    """No answer, or not in time; a later call may succeed."""


class RedisRefused(RedisFailure):
    """A refusal that repeats until an operator changes the setting `field`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class RedisLink:
    """Connection used from one event loop.

    No call takes longer than `limit_s`, connecting included.
    """

    def __init__(self, url: str, limit_s: float) -> None:
        """Prepare the connection, which opens at first use.

        Raises StartError for an invalid `redis_url`.
        """
        self._limit_s = limit_s
        # redis-py's own retries take longer than any caller here waits
        options: dict[str, Any] = {
            "socket_timeout": limit_s,
            "socket_connect_timeout": limit_s,
            "retry": Retry(NoBackoff(), 0),
            "max_connections": MAX_CONNECTIONS,
            "timeout": limit_s,
            "decode_responses": True,
            "encoding_errors": "replace",
        }
        if password := os.environ.get(PASSWORD_VARIABLE):
            options["password"] = password  # a password in the URL has precedence
        check_url(url)
        pool = BlockingConnectionPool.from_url(url, **options)
        self._client = Redis.from_pool(pool)
        known = pool.connection_kwargs
        self.where = str(known.get("path") or f"{known.get('host', 'localhost')}:{known.get('port', 6379)}")
        """Location of the server for logs, without user and password."""

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """Run a Lua script, which Redis executes atomically, and return its answer.

        Raises RedisAway, RedisRefused.

        After RedisAway the script may still have run.
        """
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._client.register_script(script)(keys=keys, args=arguments)
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            raise RedisRefused("redis_url", f"Redis at {self.where} refuses this user or password: {error}") from None
        except NoScriptError as error:
            raise RedisAway(f"Redis at {self.where} lost its scripts: {error}") from None
        except ResponseError as error:
            raise self._refused(error, keys) from None
        except (RedisError, OSError, TimeoutError) as error:
            cause = str(error) or f"no answer within {self._limit_s:g} s"
            raise RedisAway(f"Redis at {self.where}: {cause}") from None
        except Exception as error:  # errors of the client library: none may end processes that can go on without Redis
            log.exception("unexpected error from Redis at %s", self.where)
            raise RedisAway(f"Redis at {self.where}: {type(error).__name__}") from error
        finally:
            # The library uses asyncio.wait_for, which up to Python 3.11 drops a cancellation that coincides with an
            # answer.
            if task.cancelling() > cancelled:
                raise asyncio.CancelledError

    async def close(self) -> None:
        await self._client.aclose()

    def _refused(self, error: ResponseError, keys: Sequence[str]) -> RedisFailure:
        message = str(error)
        if "WRONGTYPE" in message:
            key = ", ".join(map(repr, keys))
            return RedisRefused("cluster_name", f"Redis at {self.where} has {key} in use for another type: {message}")
        if "NOAUTH" in message or "WRONGPASS" in message or "without any password" in message:
            return RedisRefused("redis_url", f"Redis at {self.where} refuses this user or password: {message}")
        if "NOPERM" in message or "permission" in message:
            return RedisRefused("redis_url", f"Redis at {self.where} does not permit this user: {message}")
        return RedisAway(f"Redis at {self.where}: {message}")  # out of memory, read-only for now, and similar


def check_url(url: str) -> None:
    """Check a Redis URL.

    Raises StartError, whose message contains nothing of the URL but the scheme.
    """
    if not url.startswith(_SCHEMES):
        raise StartError("redis_url", f"must begin with {', '.join(_SCHEMES)}")
    try:
        BlockingConnectionPool.from_url(url)
    except (ValueError, TypeError):
        raise StartError("redis_url", "is not a URL such as redis://:password@host:6379/0") from None
