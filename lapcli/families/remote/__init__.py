"""Modelling code that lapcli writes beside a slice which stock transformers classes cannot say.

A checkpoint carries copies of these files and names them in its config's `auto_map`; so they import transformers and
each other (relatively, as transformers wants it of such files), and nothing else of lapcli.
"""
