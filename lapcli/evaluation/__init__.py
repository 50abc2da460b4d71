"""Evaluation: what a model can do, measured the same way before and after it was cut.

`run.evaluate` measures models on tasks and returns an `Evaluation` (`results`); `tasks` lists the tasks and imports
nothing heavy; `table` turns an evaluation into cells for whoever draws it.
"""
