"""What commands show on narrow terminals, and where there is none."""

import io

import pytest
from rich.console import Console

from protos import inference_pb2 as pb
from tandem.cli.client.explain import candidate_table, model_table
from tandem.cli.client.status import view
from tandem.cli.tables import uncut


def _shown(thing: object, width: int, terminal: bool = True) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    with uncut(console):
        console.print(thing)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def _worker(name: str, role: str) -> pb.WorkerStatus:
    figures = {"running": 12, "decoding": 10, "loans": 3, "queued_loans": 2, "queued_prefill_tokens": 123_456}
    blocks = {"num_blocks": 16_384, "available_blocks": 9000, "cached_blocks": 5000, "prefill_tokens_per_s": 12_000}
    return pb.WorkerStatus(worker_id=name, role=role, **figures, **blocks)


def _status(*names: str) -> object:
    links = [pb.LinkStatus(borrower=name, lender="prefill-0", bytes_per_s=1e9) for name in names]
    workers = [_worker(name, "decode") for name in names]
    return view(pb.ClusterStatusResponse(models=[pb.ModelStatus(name="m", workers=workers, links=links)]))


LONG = "demo-storyteller-decode-7d9f8b6c5-abcd"


@pytest.mark.parametrize("names", [("decode-0", "decode-1"), (f"{LONG}0", f"{LONG}1")])
@pytest.mark.parametrize(("width", "terminal"), [(60, True), (80, True), (120, True), (80, False)])
def test_names_of_workers_are_whole(names: tuple[str, str], width: int, terminal: bool) -> None:
    lines = _shown(_status(*names), width, terminal)
    assert not any("…" in line for line in lines)
    for name in names:
        assert sum(line.split()[:1] == [name] for line in lines) == 2, "in the table of workers, and of links"
    if terminal:
        assert max(map(len, lines)) <= width


def test_what_there_is_no_room_for_is_said() -> None:
    said = "in a wider window: decoding, prefill tokens/s, cached, role, loans"
    assert said in _shown(_status(LONG), 72)
    assert not any("wider" in line for line in _shown(_status(LONG), 72, terminal=False))


def test_a_worker_says_how_it_started() -> None:
    worker = _worker("decode-1", "decode")
    worker.start_seconds, worker.weights_source = 8.24, "page cache"
    shown = view(pb.ClusterStatusResponse(models=[pb.ModelStatus(name="m", workers=[worker])]))
    assert any(line.rstrip().endswith("8.2 s page cache") for line in _shown(shown, 80, terminal=False))


def test_candidates_on_eighty_cells_lack_what_is_empty_first() -> None:
    candidate = pb.PlacementCandidate(
        decode_worker="decode-1", lender="prefill-0", blocks=20, lender_queue_ms=12.3, lender_compute_ms=100.5,
        transfer_ms=10, prompt_tail_ms=3, ttft_ms=130.4, delay_ms=1.2, cost_ms=131.5,
    )  # fmt: skip
    heading, row, left_out = _shown(candidate_table([candidate]), 80)
    assert heading.split() == ["decode", "lender", "queue", "compute", "transfer", "tail", "TTFT", "cost"]
    assert row.split() == ["decode-1", "prefill-0", "(holds)", "12.3", "100.5", "10.0", "3.0", "130.4", "131.5"]
    assert left_out == "in a wider window: blocks, delay"


def test_a_verdict_wraps_and_a_models_name_does_not() -> None:
    model = pb.ModelCandidate(model="a-model-of-some-name", verdict="not allowed by the rule " * 4, prompt_tokens=7)
    lines = _shown(model_table([model]), 60)
    assert sum("a-model-of-some-name" in line for line in lines) == 1
    assert " ".join(word for line in lines for word in line.split()).count("rule") == 4
