"""Any module as a sequence of layers: its forward is recorded once, and replayed in parts.

choose_opaque       which modules are never cut
call_arguments      a batch as the arguments of the model's forward
recorder            one run of the forward, or several until it is known
interception        what is called in it
tape_writer         the names of its tensors, and what is written down
stand_in            what an opaque module returns, without its weights
preserved           the model is left as it was
scratch_attributes  what a forward sets anew before it reads it
tape                operations, and what they read and write
segments            the tape cut into layers
replay              operations run on values
recorded_layer      a layer that replays its part
recorded_model      the tapes of a model, one for each kind of batch
"""
