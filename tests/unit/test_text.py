"""Text as it becomes certain: incomplete characters, stop strings across tokens, special tokens."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.model.detokenizer import CONTEXT_TOKENS, MAX_CHARACTER_TOKENS, NO_CHARACTER, UTF8_BYTES, TextStream
from support.small_tokenizers import byte_level, with_byte_fallback
from tandem.storyteller import STORYTELLER


def make_tokenizer() -> Tokenizer:
    """One token per byte: every character beyond ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = make_tokenizer()


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def test_a_character_appears_when_it_is_whole() -> None:
    stream = TextStream(TOKENIZER, encode("x"), ())
    pieces = [stream.push(token_id) for token_id in encode("aé!")]
    assert pieces == ["a", "", "é", "!"]


def test_a_possible_stop_string_is_held_back_and_released() -> None:
    stream = TextStream(TOKENIZER, [], ["END"])
    assert [stream.push(token_id) for token_id in encode("xENxEND y")] == ["x", "", "", "ENx", "", "", "", "", ""]
    assert stream.stopped == "END"
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("stops", "text", "before", "stopped", "rest"),
    [
        pytest.param(["END"], "abEN", "ab", None, "EN", id="what was held back comes at the end"),
        pytest.param(["cd", "bcd"], "abcd", "a", "bcd", "", id="the earliest of several wins"),
    ],
)
def test_stop_strings(stops: list[str], text: str, before: str, stopped: str | None, rest: str) -> None:
    stream = TextStream(TOKENIZER, [], stops)
    assert "".join(stream.push(token_id) for token_id in encode(text)) == before
    assert (stream.stopped or None) == stopped
    assert stream.finish() == rest


def test_special_tokens_are_not_text() -> None:
    stream = TextStream(TOKENIZER, [], ())
    end = TOKENIZER.token_to_id("<end>")
    assert stream.push(end) == ""


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2's and Mistral's: a character without a token of its own is bytes, and so is a line feed."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581a", "b"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_bytes_that_are_no_character_end_nothing() -> None:
    """tokenizers' `DecodeStream` raises here: the line feed before them is no character either, then."""
    tokenizer = byte_fallback_tokenizer()
    feed, broken, a, b = (tokenizer.token_to_id(token) for token in ("<0x0A>", "<0xF0>", "\u2581a", "b"))
    stream = TextStream(tokenizer, [b], ())
    pieces = [stream.push(token_id) for token_id in (feed, broken, a, b)]
    assert (pieces[:2], pieces[3]) == (["\n", ""], "b")
    assert pieces[2].endswith("\ufffd a")


@pytest.mark.parametrize("said", ["x!", "\u4e2d"])
def test_a_prompt_that_ends_within_a_character_is_not_said(said: str) -> None:
    stream = TextStream(TOKENIZER, [*encode("ab"), *encode("\u4e2d")[:1]], ())
    assert "".join(stream.push(token_id) for token_id in encode(said)) == said
    completed = TextStream(TOKENIZER, [*encode("ab"), *encode("\u4e2d")[:1]], ())
    assert "".join(completed.push(token_id) for token_id in encode("\u4e2d!")[1:]) == "\u4e2d!"


def test_no_character_is_awaited_for_ever() -> None:
    stream = TextStream(TOKENIZER, encode("a"), ())
    end, broken = TOKENIZER.token_to_id("<end>"), encode("\u4e2d")[0]
    assert "".join(stream.push(end) for _ in range(100)) == ""
    assert len("".join(stream.push(broken) for _ in range(100))) > 80


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert TextStream(None, [1, 2], ["x"]).push(3) == ""


@given(
    st.text(st.sampled_from("abE N\u00e9\u4e2d"), max_size=40),
    st.lists(st.sampled_from(["END", "b", "bb", "\u4e2dE"]), max_size=2),
    st.integers(0, 12),
)
@example("ba", ["b", "bb"], 1)
def test_all_pieces_together_are_the_text_up_to_the_first_stop(text: str, stops: list[str], early: int) -> None:
    """Of those that are complete only after `min_tokens` tokens, which are bytes here."""
    stream = TextStream(TOKENIZER, encode("a"), stops, early)
    got = "".join(stream.push(token_id) for token_id in encode(text)) + stream.finish()
    found = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and len(text[: at + len(stop)].encode()) > early
    ]
    # The stop string that is complete first ends the text; of those, the one that begins first.
    assert got == (text[: min(found)[1]] if found else text)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_replaying_a_part_gives_the_same_rest(length: int) -> None:
    """What a failover relies on: the text of all tokens does not depend on where the stream was cut."""
    tokens = encode("a\u00e9\u4e2db EN")
    whole = TextStream(TOKENIZER, encode("p"), ["END"])
    pieces = [whole.push(token_id) for token_id in tokens]
    sent = "".join(pieces[:length])
    resumed = TextStream(TOKENIZER, encode("p"), ["END"])
    replayed = "".join(resumed.push(token_id) for token_id in tokens[:length])
    rest = "".join(resumed.push(token_id) for token_id in tokens[length:]) + resumed.finish()
    assert (replayed + rest)[len(sent) :] == "".join(pieces[length:]) + whole.finish()


def word_pieces() -> Tokenizer:
    """Words and their parts, of which decoding changes what it said before: "do not" becomes "don't"."""
    words = ["[UNK]", "<end>", "do", "not", "##n", "##'t", "n't", "'t", "is", "."]
    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


MAKERS = {
    "bytes": make_tokenizer,
    "byte level": byte_level,
    "byte fallback": with_byte_fallback,
    "bytes that fall back": byte_fallback_tokenizer,
    "word pieces": word_pieces,
    "storyteller": lambda: Tokenizer.from_file(str(STORYTELLER / "tokenizer.json")),
    "shapes": lambda: Tokenizer.from_file("examples/shapes/model/tokenizer.json"),
}
DRAWS = 300


@pytest.fixture(scope="module", params=MAKERS)
def anyones(request: pytest.FixtureRequest) -> Tokenizer:
    return MAKERS[request.param]()


def pieces_of(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], keeps_special: bool) -> list[str]:
    stream = TextStream(tokenizer, prompt, (), keep_special_tokens=keeps_special)
    return [stream.push(token_id) for token_id in tokens]


def plain_pieces_of(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], keeps_special: bool) -> list[str]:
    """The text of each token, by decoding the last ones again."""

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=not keeps_special)
        return text

    last = prompt[-CONTEXT_TOKENS:]
    while decode(last).startswith(NO_CHARACTER) and len(last) < min(len(prompt), CONTEXT_TOKENS + UTF8_BYTES - 1):
        last = prompt[-1 - len(last) :]
    waiting, pieces = list[int](), []
    for token_id in tokens:
        waiting.append(token_id)
        before, text = decode(last), decode(last + waiting)
        is_late = len(waiting) >= MAX_CHARACTER_TOKENS
        num_equal = next((at for at in range(len(before), 0, -1) if text.startswith(before[:at])), 0)
        pieces.append(text[num_equal:] if is_late or not text.endswith(NO_CHARACTER) else "")
        if is_late or pieces[-1]:
            last, waiting = waiting, []
    return pieces


OUTPUTS = (
    "the END \U0001f98a",
    " cafe\u0301 \u00e9",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\u65e5\u672c \n\n",
    "once",
    " do not.",
)


@settings(max_examples=DRAWS, deadline=None)
@given(data=st.data())
def test_pieces_are_the_text_of_all_tokens_decoded_at_once(anyones: Tokenizer, data: st.DataObject) -> None:
    """Of characters of several tokens, and with special tokens between them."""
    special = [] if (token := anyones.token_to_id("<end>")) is None else [token]
    parts = st.lists(st.sampled_from([*OUTPUTS, "<>"]), max_size=8)

    def drawn() -> list[int]:
        encoded = (
            special if part == "<>" else anyones.encode(part, add_special_tokens=False).ids for part in data.draw(parts)
        )
        return [token_id for ids in encoded for token_id in ids]

    prompt, tokens = anyones.encode("the", add_special_tokens=False).ids + drawn(), drawn()
    keeps = data.draw(st.booleans())
    before, whole = (anyones.decode(ids, skip_special_tokens=not keeps) for ids in (prompt, prompt + tokens))
    assert "".join(pieces_of(anyones, prompt, tokens, keeps)) == whole[len(before) :]


@settings(max_examples=DRAWS, deadline=None)
@given(data=st.data())
def test_any_tokens_have_the_text_of_decoding_again_and_again(anyones: Tokenizer, data: st.DataObject) -> None:
    """Also of those that no tokenizer makes: bytes that are no characters, and special tokens without end."""
    ids = st.sampled_from(range(anyones.get_vocab_size()))
    some = st.lists(ids, min_size=1, max_size=6)
    tokens = data.draw(st.lists(st.tuples(some, st.sampled_from([1, 2, 9, 20])), max_size=6))
    prompt, keeps = data.draw(some), data.draw(st.booleans())
    drawn = [token_id for part, times in tokens for token_id in part * times]
    assert pieces_of(anyones, prompt, drawn, keeps) == plain_pieces_of(anyones, prompt, drawn, keeps)
