"""`make compare`: routers of other systems and Tandem's, alone and in turns."""

import uvloop
from rich.console import Console

from bench.compare.http_wire import MODEL_NAME
from bench.compare.routers import bars_of, measure
from bench.models import SMALL_LLAMA, cpu_dtype, llama
from bench.support.report import OUT, conclude


async def main() -> None:
    console, dtype = Console(width=160), cpu_dtype()
    model = llama((OUT / f"small-llama-{dtype}" / MODEL_NAME).absolute(), SMALL_LLAMA, dtype)
    figures = await measure(model, console)
    conclude("compare-routers", bars_of(figures), figures, console)


if __name__ == "__main__":
    uvloop.run(main())
