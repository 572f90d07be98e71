"""The tests, one folder a part of the package. A package itself, so that helpers import as tests.<folder>.<file>."""
