"""Rules for the next token beyond plain sampling: grammars and parallel sampling."""
