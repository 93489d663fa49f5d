"""The commands of `tandem`, by what they are for. Each imports what it needs when it runs: `--help` is quick."""
