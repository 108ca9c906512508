"""One stage: its forward, its backward, and what it keeps between them.

stage           the stage: forward, backward, weight gradients
stage_layers    which values its layers read and write
stage_values    what enters and leaves a forward, and what is kept until the backward
forward_pass    one forward of one micro-batch
recomputation   a second forward before the backward
stage_border    tensors enter the stage's graph, and gradients leave it
weight_calls    functions that use weights are intercepted
split_backward  gradients of inputs first, of weights later
autograd        calls of autograd's engine
offload         saved tensors in host memory
"""
