"""The command line: one file a command, shared options in `options`, all drawing in `display`.

No module here imports torch or transformers before a command runs.
"""
