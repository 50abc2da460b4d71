"""Selectors: calibration statistics in, kept key/query channels out.

`lapcli.selectors.registry` lists them, `lapcli.selectors.base` defines what they take and give,
`lapcli.selectors.budget` turns a ratio into a kept width.
"""
