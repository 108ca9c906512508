"""Make a pipelined step equal, bit for bit, to a plain loop.

randomness            random numbers by seed, step, micro-batch and layer name
batch_norm            running statistics over micro-batches
tied_weights          weights that several layers share
weight_aliases        parameters that take the place of a weight in a layer
unregistered_weights  weights that a layer reaches by other ways than its own module
in_place              layers that change their inputs in place
strided_copy          copies with the strides and alignment of the original
layer_state           buffers, counters and generators that a forward changes
state_values          copies of one value of such state
shared_buffers        buffers that layers of several stages share
inner_gradients       layers that differentiate themselves
caller_context        autocast, hooks, modes and context variables of the caller
parity                the plain loop, and the comparison with it
"""
