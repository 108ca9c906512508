"""What a forward does while it is recorded: intercepted, and refused if it could not be repeated.

tape_recorder      calls of opaque modules, and of torch's functions between them
constants          arguments and calls that a tape cannot have
fresh_tensors      tensors that a forward makes, which are no constants
functions          what a function does by its name
operator_recorder  operators below functions that torch.func transforms
operator_watch     random numbers, and shapes that follow from data
read_attributes    numbers of a model that its code may go by
state              names of parameters and buffers
tracked_tensors    tensors with their names on the tape
value_marks        values that depend on layers, on chance, or on data in their shapes
"""
