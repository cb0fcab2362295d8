"""The tests, as a package: a dependency of LMCache installs a top-level `tests` of its own, which would hide a folder."""
