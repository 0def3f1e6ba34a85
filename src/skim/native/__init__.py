"""C code compiled on the machine it runs on, and its builder."""
