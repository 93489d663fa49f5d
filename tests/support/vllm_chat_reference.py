"""The tokens that vLLM makes of chats with pictures, before it expands them: run by an interpreter with vLLM.

`python -m support.vllm_chat_reference MODEL CHATS` prints a list of token ids for each chat of the JSON text.
"""

import json
import logging
import os
import sys
from typing import Any


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template
    from vllm.tokenizers import get_tokenizer

    config = EngineArgs(model=sys.argv[1], dtype="float32").create_model_config()
    tokenizer: Any = get_tokenizer(sys.argv[1])
    form = resolve_chat_template_content_format(
        chat_template=None, tools=None, given_format="auto", tokenizer=tokenizer, model_config=config
    )
    found = []
    for messages in json.loads(sys.argv[2]):
        conversation, _, _ = parse_chat_messages(messages, config, content_format=form)
        found.append(safe_apply_chat_template(config, tokenizer, conversation, add_generation_prompt=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
