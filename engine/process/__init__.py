"""The engine process: how a worker's front starts it, talks to it and assembles its parts."""
