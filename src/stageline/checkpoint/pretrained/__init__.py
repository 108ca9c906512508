"""Weights in files as transformers and huggingface_hub write and read them.

weight_files     the safetensors files at a path, and the tensors in them
match_names      the name in the files of each tensor of the model
shared_names     all names of each tensor of the model
load_pretrained  sl.load_pretrained
export_folder    sl.export to a folder
config_files     the configuration of the user's model as files
"""
