"""GPipe (arXiv 1811.06965, figure 2c): all forwards, then all backwards.

    rank 0 │ F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
    rank 1 │ .. F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
    rank 2 │ .. .. F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3                   p = 3, m = 4
"""
