"""What would make a run faster: each cause is looked for in what was measured.

finding         a finding, and the least gain that is worth one
measured_step   times of stages, layers and messages, from the recorded steps
even_cut        layers in stages of equal time
causes          one function for each cause
findings        all of them, those with the greatest gain first
"""
