"""What stages, messages and steps take beyond their layers: measured by profiles, used by plans."""

from __future__ import annotations

from stageline.planning.validation import Amount, validated


@validated
class ActionOverheads:
    """What the actions of a stage take without any layer's work, in seconds.

    A layer that is profiled alone includes them, and a stage has them once, not for each layer.
    """

    forward: Amount = 0.0
    backward: Amount = 0.0
    forward_in_halves: Amount = 0.0  # the F before an I and a W
    input_grad: Amount = 0.0
    weight_grad: Amount = 0.0


@validated
class HostCosts:
    """What the host takes between actions and around them, in seconds."""

    action: Amount = 0.0  # from the end of an action to the start of the next one on its rank
    handoff: Amount = 0.0  # from its end to the start of one that waited for it on another rank
    step: Amount = 0.0  # from the call of a step to its first action, and after its last one


NO_OVERHEADS, NO_HOST_COSTS = ActionOverheads(), HostCosts()
