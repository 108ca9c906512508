"""From a name and sizes to a schedule."""
from stageline.schedules.families.one_f_one_b import one_f_one_b
def build_schedule(name, num_ranks, num_microbatches):
    return one_f_one_b(num_ranks, num_microbatches)
