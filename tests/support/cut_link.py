"""A TCP link that can be cut: listens on one loopback address and passes on to the same port of another."""

import asyncio


class CutLink:
    """Between `address`, which others are told, and where a process really listens."""

    def __init__(self, host: str, port: int, target_host: str) -> None:
        self._host, self._port, self._target_host = host, port, target_host
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.num_cut = 0

    async def __aenter__(self) -> "CutLink":
        self._server = await asyncio.start_server(self._serve, self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        self._open.set()

    def cut(self) -> None:
        """Reset every connection, with what is under way. New ones are let through."""
        self.num_cut += len(self._writers) // 2
        for writer in self._writers:
            writer.transport.abort()

    def swallow(self) -> None:
        """Pass nothing on, and say so to nobody."""
        self._open.clear()

    def restore(self) -> None:
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._target_host, self._port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        try:
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        except OSError:
            pass  # reset by either end, or by `cut`
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._open.wait()
            target.write(data)
            await target.drain()
        target.transport.abort()
