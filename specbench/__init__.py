"""A benchmark harness for speculative decoding: is this speedup real, on my models and my machine?"""

__version__ = "0.1.0"
