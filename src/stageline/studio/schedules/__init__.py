"""The requests of the page of schedules: built, simulated, searched, checked and saved.

    fields ─► order (built, searched or edited; kept) ─► times, memory, measures ─► picture

fields     what the page asks for: a schedule, its costs, a search
orders     build orders, and keep those that were shown lately
arrays     the actions of an order as arrays
timing     when each action runs, and what each rank holds, for given costs
picture    all that the page draws, as a header and arrays
search     search for an order, with progress
save       files and the line of Python that make the same schedule
routes     the addresses of these requests
"""
