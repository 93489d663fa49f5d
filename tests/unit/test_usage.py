"""The usage ledger: its sums are those of its entries, after any crash."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import StartError
from router.usage import FileLedger, UsageEntry, UsageTotal, UsageTotals, first_day

NOON = 1_795_600_800.0  # 2026-11-25, 10:00 UTC
ENTRY = UsageEntry("r", NOON, "alice", "m", 100, 60, 20, 5, True)
ENTRIES = st.builds(
    UsageEntry,
    request_id=st.text(max_size=5),
    at=st.integers(0, 3).map(lambda days: NOON + 86_400.0 * days),
    tenant=st.sampled_from(["", "alice", 'bob "b"\n']),
    model=st.sampled_from(["m", "other"]),
    input_tokens=st.integers(0, 1000),
    cached_tokens=st.integers(0, 1000),
    output_tokens=st.integers(0, 1000),
    reasoning_tokens=st.integers(0, 1000),
    is_complete=st.booleans(),
)


def test_totals_by_day_tenant_and_model() -> None:
    totals = UsageTotals(kept_days=2)
    for entry in (ENTRY, ENTRY, replace(ENTRY, tenant="bob"), replace(ENTRY, at=NOON + 86_400)):
        totals.add(entry)
    assert totals.since("2026-11-25") == [
        UsageTotal("2026-11-25", "alice", "m", 2, 200, 120, 40, 10),
        UsageTotal("2026-11-25", "bob", "m", 1, 100, 60, 20, 5),
        UsageTotal("2026-11-26", "alice", "m", 1, 100, 60, 20, 5),
    ]
    totals.add(replace(ENTRY, at=NOON + 2 * 86_400))
    assert [total.day for total in totals.since("")] == ["2026-11-26", "2026-11-27"], "older days are forgotten"


def test_days_count_today() -> None:
    assert first_day("2026-11-25", 1) == "2026-11-25"
    assert first_day("2026-03-02", 3) == "2026-02-28"


@given(st.lists(ENTRIES, max_size=8), st.data())
async def test_a_ledger_that_was_cut_off_has_every_whole_entry(entries: list[UsageEntry], data: st.DataObject) -> None:
    """The file ends anywhere: a router that opens it knows all entries before, and goes on."""
    folder = Path(data.draw(st.just("/tmp")))
    path = folder / f"usage-{data.draw(st.uuids())}"
    try:
        ledger = FileLedger(path, 1000)
        for entry in entries:
            await ledger.add(entry)
        await ledger.close()
        content = path.read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:cut])
        known = content[:cut].count(b"\n")
        again = FileLedger(path, 1000)
        await again.add(ENTRY)
        await again.close()
        expected = UsageTotals(1000)
        for entry in [*entries[:known], ENTRY]:
            expected.add(entry)
        last = FileLedger(path, 1000)
        assert await last.since(1_000_000) == expected.since("")
        await last.close()
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("line", [b"{}\n", b"no json\n", b"[1]\n"])
def test_another_file_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "usage").write_bytes(ENTRY.to_line() + line)
    with pytest.raises(StartError, match="line 2"):
        FileLedger(tmp_path / "usage", 10)
    with pytest.raises(StartError, match="usage_ledger"):
        FileLedger(tmp_path / "missing" / "usage", 10)
