"""Training written down and taken up again, on any number of ranks.

desk        who takes part: processes that agree or fail together, one save at a time
values      Python values as JSON
storage     tensors written to safetensors files, with checksums
reading     tensors read from them, none before it is known to be what was written
contents    what a process holds, under the names of the user's model, and the rest as JSON
folder      checkpoints in a folder: complete or not there, the newest, how many are kept
fitting     whether a checkpoint fits a pipeline
save, load, export
"""
