"""What `tandem demo` asks for, and how it sums up what it got."""

from protos import inference_pb2 as pb
from tandem.cli.cluster.demo import make_stories, summary

BLOCK_CHARS = 16
"""Fewer characters than a KV block of the demo model has."""


def test_long_prompts_share_no_block() -> None:
    prompts = [messages[0][1] for story in make_stories(8) if len(messages := story.messages) > 1]
    assert len(prompts) == 4
    assert len({prompt[:BLOCK_CHARS] for prompt in prompts}) == 4  # type: ignore[index]


def test_the_summary_counts_the_loans_and_blocks_of_all_requests() -> None:
    def receipt(lender: str = "", **kv: object) -> pb.Receipt:
        return pb.Receipt(kv=pb.KvReceipt(**kv), placement=pb.Placement(lender=lender))  # type: ignore[arg-type]

    whole = receipt("prefill-0", moved_blocks=12, verified_blocks=12)
    failed = receipt("prefill-0", moved_blocks=3, verified_blocks=3, loan_failure="it died")
    hedged = receipt("prefill-0", moved_blocks=7, verified_blocks=7, hedged_blocks=5)
    assert summary([whole, failed, hedged, receipt(reused_blocks=12), receipt()]) == (
        "1 of 3 loans were whole; 22 KV blocks moved, 22 verified, 0 mismatched; 12 reused from the cache"
    )
