"""A page in Chromium that uses the API from another origin: its cells are as those of `features.py`.

The page's script asks a chat, streams one and reads an error, with the headers that OpenAI's client sends. Chromium
sends the preflights and withholds what no answer allows.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.router.site import free_port

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
"""Names of the browser."""
LIMIT_S = 60.0
PAGE = """<!doctype html><script>
const ask = (body) => fetch("BASE/v1/chat/completions", {
  method: "POST",
  headers: { authorization: "Bearer none", "content-type": "application/json", "x-stainless-lang": "js" },
  body: JSON.stringify({ model: "model", messages: [{ role: "user", content: "Hello" }], max_tokens: 8, ...body }),
});
(async () => {
  const whole = await ask({});
  if (!(await whole.json()).choices[0].message) throw new Error("no message");
  if (!whole.headers.get("x-request-id")) throw new Error("x-request-id is not shown to the page");
  let text = "";
  const reader = (await ask({ stream: true })).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let piece; !(piece = await reader.read()).done; ) text += piece.value;
  if (!text.endsWith("data: [DONE]\\n\\n")) throw new Error("the stream did not end");
  const refused = await ask({ temperature: -1 });
  if (refused.status !== 400 || (await refused.json()).error.param !== "temperature") throw new Error("no typed error");
  return "";
})().catch(String).then((failure) => fetch("/result", { method: "POST", body: failure }));
</script>"""
"""Page that posts what its script failed with to where it came from."""


async def browser_cells(base: str, allowed_port: int, folder: Path) -> list[dict[str, Any]]:
    """Return the cells of the page at its allowed port and at another one; none where there is no Chromium."""
    command = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if command is None:
        return []
    cells = []
    for port, feature, expected in (
        (allowed_port, "a page of cors_origins: chat, stream, error", ""),
        (free_port(), "a page of another origin", "its origin is not in cors_origins"),
    ):
        async with _serving(PAGE.replace("BASE", base), port) as failure:
            page = f"http://127.0.0.1:{port}/"
            cells.append({"client": "Chromium", "feature": feature, "expected": expected})
            cells[-1]["failure"] = await _opened(command, page, folder / f"profile-{port}", failure)
    return cells


async def _opened(command: str, page: str, profile: Path, failure: "asyncio.Future[str]") -> str:
    """Open a page, and return what its script failed with; empty where it did not."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    output = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
    process = await asyncio.create_subprocess_exec(command, *options, page, **output)
    try:
        return await asyncio.wait_for(failure, LIMIT_S)
    except TimeoutError:
        return f"the page did not end within {LIMIT_S:g} s"
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _serving(page: str, port: int) -> AsyncIterator["asyncio.Future[str]"]:
    """Serve the page at a port; the future gets what it posts."""
    failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        except asyncio.IncompleteReadError:  # a spare connection that Chromium opened and never used
            writer.close()
            return
        length = head.partition("content-length:")[2].partition("\r\n")[0]
        posted = (await reader.readexactly(int(length or 0))).decode()
        if head.startswith("post") and not failure.done():
            failure.set_result(posted)
        content = page.encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n")
        writer.write(f"content-length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server:
        yield failure
