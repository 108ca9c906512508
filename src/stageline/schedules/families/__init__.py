"""Schedule families, one file each, named as in `build_schedule`.

Each is a function from sizes to a `Schedule`. A new family is a file here and a row in
`registry.py`.
The files that build several families are `building_block.py` (v_half, v_min), `split_1f1b.py`
(zb_h1, zb_h2), `row_steps.py` and `fill_waits.py`.
"""
