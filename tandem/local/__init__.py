"""The cluster as plain processes of this machine."""
