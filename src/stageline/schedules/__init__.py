"""Schedules as values: how they are built, checked, lowered and searched, without torch.

- `action`, `schedule`, `placement`, `edges`, `csv`: the values and their files
- `families/`: the schedules of the literature, one file each; `build`: build one by name
- `rules/`, `check`: the rules of schedules and programs
- `program/`: programs, and the lowering of schedules to them
- `task_graph`, `action_times`, `lower_bounds`: dependencies, times and proven bounds
- `search/`: the search for the best order
"""
