"""Serving a model over the OpenAI HTTP interface: an HTTP front, and an engine process that it keeps alive.

The front (`app`, `server`) checks requests, queues them fairly and streams answers; it never computes. The engine
(`worker`) holds the model and does one step after the other. They talk over a socket pair (`protocol`).
"""
