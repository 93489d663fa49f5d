"""Rules for the next token beyond plain sampling: grammars, parallel sampling and beam search."""
