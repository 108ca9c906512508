"""Save, load and export checkpoints on any number of ranks.

group           operations of all processes: they succeed together or fail together
json_values     Python values as JSON
write_tensors   write tensors to safetensors files with checksums
read_tensors    read them, and verify the checksums before use
record          the fields of checkpoint.json
record_file     read and write checkpoint.json with its checksum
folder          the checkpoints in a folder: complete or absent, latest, how many to keep
pipeline_state  everything that checkpoints read from a pipeline and its optimizers
compatibility   refuse a checkpoint that does not match the pipeline
option_values   match saved optimizer options and scheduler states with the current ones
save, load, export
pretrained/     weights as transformers writes and reads them
"""
