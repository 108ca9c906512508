"""Times that several processes can compare: `perf_counter`, moved to the time of day.

Processes of one machine agree to microseconds, machines as well as their clocks do.
"""

from time import perf_counter, time

SHIFT = time() - perf_counter()
