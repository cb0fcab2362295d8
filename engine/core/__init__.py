"""The engine core: what it computes, the loop that steps it, its process, and the client of it."""
