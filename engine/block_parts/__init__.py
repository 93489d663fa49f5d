"""Parts of every block that an engine's ranks hold in processes of their own: messages, reads and whole blocks."""
