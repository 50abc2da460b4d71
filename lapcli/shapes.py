"""The axes, one letter each, as every docstring and annotation uses them.

| letter | axis |
| --- | --- |
| `B` | batch |
| `T` | time (tokens of one row) |
| `N` | tokens counted over all rows, or packed sequences |
| `H` | key heads (a query head reads with the key head of its number) |
| `HV` | value heads; `HV / H` of them share a key head (GVA) |
| `K` | key width of a head, the axis that lapcli cuts |
| `K'` | kept key width |
| `V` | value width of a head |
| `C` | chunk length |
| `D` | model width |
| `L` | stateful layer |

A state is `[B, HV, K, V]`, written by `k u^T` and read by `S^T q`. Gates are in log space where a name says so.
"""
