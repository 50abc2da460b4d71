"""How fast models, mixers and state operators run here, beside what is the least that they must take.

`decode`, `prefill` and `operators` measure; each cell is a row of `results`, written as it is made. A way whose results
are wrong (`gate`) has no speed.
"""
