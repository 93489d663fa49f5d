"""One connection to Redis as every process uses it: scripts only, each with a time limit, and typed failures.

Nothing here says the url: it may have a password.
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
"""In the environment: the password of a `redis_url` that has none. A command line can be read by others."""
MAX_CONNECTIONS = 4
_SCHEMES = ("redis://", "rediss://", "unix://")


class RedisFailure(TandemError):
    """Redis did not do what it was asked to."""


class RedisAway(RedisFailure):
    """It does not answer, or not in time: ask again later."""


class RedisRefused(RedisFailure):
    """It answers and refuses; asking again will not help. `field` is the setting that somebody must look at."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class RedisLink:
    """Used from one event loop. No call takes longer than `limit_s`, connecting included."""

    def __init__(self, url: str, limit_s: float) -> None:
        """Connects when it is first used. Raises StartError for a `redis_url` that is none."""
        self._limit_s = limit_s
        # What redis-py does by itself when a call fails takes longer than anybody here waits.
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
            options["password"] = password  # one in the url comes first
        check_url(url)
        pool = BlockingConnectionPool.from_url(url, **options)
        self._client = Redis.from_pool(pool)
        known = pool.connection_kwargs
        self.where = str(known.get("path") or f"{known.get('host', 'localhost')}:{known.get('port', 6379)}")
        """For logs: where it is, without user and password."""

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """The answer of a Lua script, which Redis runs as a whole or not at all. Raises RedisAway, RedisRefused.

        After RedisAway it may have been run all the same.
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
        except Exception as error:  # the client library's own: no fault of it may end what goes on without Redis
            log.exception("unexpected, from Redis at %s", self.where)
            raise RedisAway(f"Redis at {self.where}: {type(error).__name__}") from error
        finally:
            # The library uses asyncio.wait_for, which up to Python 3.11 drops a cancellation that comes with an answer.
            if task.cancelling() > cancelled:
                raise asyncio.CancelledError

    async def close(self) -> None:
        await self._client.aclose()

    def _refused(self, error: ResponseError, keys: Sequence[str]) -> RedisFailure:
        said = str(error)
        if "WRONGTYPE" in said:
            key = ", ".join(map(repr, keys))
            return RedisRefused("cluster_name", f"in Redis at {self.where}, {key} is something else: {said}")
        if "NOAUTH" in said or "WRONGPASS" in said or "without any password" in said:
            return RedisRefused("redis_url", f"Redis at {self.where} refuses this user or password: {said}")
        if "NOPERM" in said or "permission" in said:
            return RedisRefused("redis_url", f"Redis at {self.where} does not permit this user: {said}")
        return RedisAway(f"Redis at {self.where}: {said}")  # out of memory, read-only for now, and the like


def check_url(url: str) -> None:
    """Raises StartError for what is no url of a Redis. Its message has nothing of the url but the scheme."""
    if not url.startswith(_SCHEMES):
        raise StartError("redis_url", f"must begin with {', '.join(_SCHEMES)}")
    try:
        BlockingConnectionPool.from_url(url)
    except (ValueError, TypeError):
        raise StartError("redis_url", "is no url such as redis://:password@host:6379/0") from None
