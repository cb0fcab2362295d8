"""A package: otherwise the top-level `tests` that a dependency of LMCache installs would hide this folder."""
