"""Placement terms of other packages: they decide and are listed like built-in ones, or the router does not start."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

import pytest

from cluster.errors import StartError
from router.observability.explained import candidate_of
from router.placement import costs, terms
from router.placement.demand import Demand
from router.placement.place import explain, place
from router.placement.rates import Priors, Rates
from router.placement.worker_table import Hits, WorkerTable, WorkerView

PRIORS = Priors(1000, 100, 1e6, 0.01, 0.002, 0.001)
DEMAND = Demand(num_tokens=42, num_usable_blocks=10, num_total_blocks=12, block_tokens=4, block_bytes=1000)
FULLNESS = (Path(__file__).parents[2] / "examples" / "plugins" / "fullness.py").read_text()
HEAD = "import numpy as np\nfrom router.placement.terms import Term\nclass Made(Term):\n"


class Install(Protocol):
    def __call__(self, code: str, entry: str = "made = this_module:Made") -> None: ...


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Function that installs a package with one module, `this_module`, and an entry point."""

    def forget() -> None:
        terms.further_terms.cache_clear()
        terms.delay_terms.cache_clear()

    def do(code: str, entry: str = "made = this_module:Made") -> None:
        (tmp_path / "this_module.py").write_text(code)
        about = tmp_path / "these_terms-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: these-terms\nVersion: 1\n")
        (about / "entry_points.txt").write_text(f"[{terms.GROUP}]\n{entry}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "this_module", raising=False)
        forget()

    yield do
    monkeypatch.undo()
    forget()


def fleet(num_workers: int) -> tuple[WorkerTable, Rates]:
    """Equal workers, of which the first are nearly full."""
    views = [
        WorkerView(
            f"{'d' if number % 2 else 'p'}{number:02}", number % 2 == 1, b"m", 0, 0, 0, 15 if number < 4 else 100, 100
        )
        for number in range(num_workers)
    ]
    return WorkerTable.of(views), Rates.uniform(num_workers, PRIORS)


def test_a_term_decides_and_is_listed_by_its_name(install: Install) -> None:
    workers, rates = fleet(8)
    hits = Hits.of(workers, {})
    plain = place(DEMAND, workers, hits, rates)
    install(FULLNESS, "made = this_module:Fullness")
    decision = place(DEMAND, workers, hits, rates)
    assert (plain.decode_id, decision.decode_id) == ("d01", "d05")
    assert decision.cost_s == plain.cost_s
    listed = explain(DEMAND, workers, hits, rates)
    full = next(each for each in listed if each.decode_id == "d01")
    assert full.seconds["fullness"] == pytest.approx(0.05 * 0.85**4)
    assert full.delay_s == full.seconds["fullness"] == pytest.approx(full.cost_s - full.ttft_s)
    assert dict(candidate_of(full).further_ms) == {"fullness": pytest.approx(1e3 * full.delay_s)}
    assert not candidate_of(listed[0]).further_ms["fullness"]


def test_a_term_of_pairs_decides_in_a_fleet_of_so_many_that_the_bound_excludes_most(install: Install) -> None:
    """The term gives one pair its best cost, far below 0, which only its own bound knows of."""
    install(
        f"{HEAD}    name = 'far'\n"
        "    def seconds(self, pairs):\n"
        "        if pairs.kind == 'alone': return 0.0\n"
        "        return np.where((pairs.decode.column == 10) & (pairs.lenders == 39), -5.0, 1.0)\n"
        "    def lower_bound(self, pairs):\n"
        "        return np.where(pairs.decode.column == 10, -5.0, 0.0), 0.0\n"
    )
    workers, rates = fleet(60)
    hits = replace(Hits.of(workers, {}), last_decode=25)
    whole = place(DEMAND, workers, hits, rates)
    with patch.multiple(costs, MANY_PAIRS=0, SAMPLE=2):
        bounded = place(DEMAND, workers, hits, rates)
    assert bounded == whole
    assert (whole.decode_id, whole.lender_id) == (workers.ids[10], workers.ids[39])
    assert whole.cost_s < -4


@pytest.mark.parametrize(
    ("code", "entry", "fault"),
    [
        ("", "made = this_module:Made", "has no attribute 'Made'"),
        ("raise ValueError('no such site')", "made = this_module:Made", "ValueError: no such site"),
        ("Made = 5", "made = this_module:Made", "is a int, not a router.placement.terms.Term"),
        (f"{HEAD}    name = 'x'", "made = this_module:Made", "abstract"),
        (f"{HEAD}    def seconds(self, pairs): return 0.0", "made = this_module:Made", "has the name None"),
        (
            f"{HEAD}    name = 'transfer'\n    def seconds(self, pairs): return 0.0",
            "made = this_module:Made",
            "'transfer'",
        ),
        (
            f"{HEAD}    name = 'x'\n    def seconds(self, pairs): return np.zeros(7)",
            "made = this_module:Made",
            "broadcast",
        ),
        (f"{HEAD}    name = 'x'\n    def seconds(self, pairs): return np.nan", "made = this_module:Made", "not finite"),
        (f"{HEAD}    name = 'x'\n    def seconds(self, pairs): return -1.0", "made = this_module:Made", "lower bound"),
    ],
)
def test_a_term_that_cannot_be_used_is_named_at_the_start(install: Install, code: str, entry: str, fault: str) -> None:
    install(code, entry)
    with pytest.raises(StartError, match=rf"tandem\.placement_terms\.made.*{fault}"):
        terms.further_terms()
