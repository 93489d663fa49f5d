"""Model directories whose tokenizers and templates have places for pictures, for the sim engine."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from support.sim_directories import write_sim_model, write_tokenizer

VOCAB = 600
PLACES = ("<image>", "<audio>", "<video>")
PARTS_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that reads parts."""
STRINGS_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that reads texts only."""


def write_media_model(path: Path, template: str = PARTS_TEMPLATE, context: int = 100_000) -> Path:
    """A model with the placeholders of the sim engine's media processor."""
    write_sim_model(path, VOCAB, context=context)
    write_tokenizer(path, VOCAB - len(PLACES))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(place, special=True, normalized=False) for place in PLACES])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return path


def place_of(path: Path, kind: str = "image") -> int:
    """Token of a kind's placeholder."""
    token = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id(f"<{kind}>")
    assert token is not None
    return token
