"""What is known of an engine process that crashes."""

from pathlib import Path

from support.real_engines import RealEngine
from support.vllm_engines import STORYTELLER


async def test_the_error_of_a_crashed_vllm_ends_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho one >&2\necho 'RuntimeError: out of luck' >&2\nexit 3\n")
    program.chmod(0o755)
    engine = RealEngine("crashing", STORYTELLER, engine="vllm", vllm_python=program)
    engine.host.start(engine)
    assert await engine.has_ended() == "its process ended with code 3: RuntimeError: out of luck"
