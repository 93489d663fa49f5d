"""What is made of saved weights has a name of its own."""

from engine.variant import AS_SAVED, Variant

SAVED, OTHER = bytes(32), bytes([1]) * 32


def test_weights_as_saved_keep_their_fingerprint() -> None:
    assert AS_SAVED.fingerprint(SAVED) == SAVED


def test_other_numbers_have_another() -> None:
    made = [Variant(weights=kind).fingerprint(saved) for kind in ("auto", "int8") for saved in (SAVED, OTHER)]
    assert len(set(made)) == 4
    assert {len(each) for each in made} == {32}
    assert Variant(weights="int8").fingerprint(SAVED) == Variant(weights="int8").fingerprint(SAVED)
