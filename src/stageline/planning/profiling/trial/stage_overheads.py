"""What a stage and a step take beyond their layers: measured by a trial pipeline, used by plans."""

from __future__ import annotations

from stageline.planning.validation import Amount, Difference, validated


@validated
class JointSavings:
    """How much less an action takes for each joint of two layers in its stage, in seconds.

    A layer that is profiled alone has the overhead of a whole stage, and reads an input that has
    left the cache. Negative where layers take longer together: a stage holds more memory than a
    layer, and more of it is new to the operating system.
    """

    forward: Difference = 0.0
    backward: Difference = 0.0
    forward_in_halves: Difference = 0.0  # the F before an I and a W
    input_grad: Difference = 0.0
    weight_grad: Difference = 0.0


@validated
class HostCosts:
    """What the host takes between actions and around them, in seconds."""

    action: Amount = 0.0  # from the end of an action to the start of the next one on its rank
    handoff: Amount = 0.0  # from its end to the start of one that waited for it on another rank
    step: Amount = 0.0  # from the call of a step to its first action, and after its last one


NO_SAVINGS, NO_HOST_COSTS = JointSavings(), HostCosts()
