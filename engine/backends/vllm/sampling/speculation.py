"""Speculative decoding within vLLM: which of its methods run under Tandem, and what they mean for the KV of blocks.

The KV of draft layers lies in vLLM's pool beside that of the model's layers, so it is lent with it.
"""

import os
from typing import Any, get_args

from vllm.config.speculative import MTPModelTypes

from engine.backends.vllm.identity import draft_weights
from engine.errors import EngineStartError

FIELD = "vllm_options"
COUPLED = "TANDEM_COUPLED_VERIFICATION"
"""Environment variable that tells worker processes to verify drafts as this process does."""
METHODS = ("ngram", "ngram_gpu", "draft_model", "eagle", "eagle3", *get_args(MTPModelTypes), "dflash", "dspark")
"""Methods of vLLM's `speculative_config` that run under Tandem."""


def set_up_speculation(vllm_config: Any) -> None:
    """Prepare the speculation of a VllmConfig, if it has any.

    Raises EngineStartError for a method that cannot run here, and for a draft model that is no directory.
    """
    if (wanted := vllm_config.speculative_config) is None:
        return
    if wanted.method not in METHODS:
        reason = f"speculative_config: method {wanted.method!r} does not run on Model Runner V2, with which Tandem"
        raise EngineStartError(FIELD, f"{reason} speculates: take ngram, draft_model, eagle, eagle3 or mtp")
    if not vllm_config.use_v2_model_runner:
        reason = "speculative_config: Model Runner V1, which vLLM takes here, gives other tokens with drafts than"
        raise EngineStartError(FIELD, f"{reason} without: leave it out; on GPUs vLLM takes V2")
    draft_weights(vllm_config)  # so that a missing directory is told before the model is loaded
    # With it vLLM computes the last cached block again, because the KV of its last token in draft layers was made with
    # a guess of the next token. A lender's job knows that token, and coupled verification gives equal tokens anyway.
    wanted.disable_eagle_block_drop = True
    from engine.backends.vllm.sampling.verification import couple_verification

    couple_verification()
    os.environ[COUPLED] = "1"
