"""All kinds of damage to a checkpoint; frequent ones are listed several times."""

from __future__ import annotations

from benchmarks.damage_kinds.in_bytes import CHANGES, Damage, changing
from benchmarks.damage_kinds.in_files import (
    file_empty,
    file_half_of_another_checkpoint,
    file_is_a_folder,
    file_is_a_link,
    file_is_a_pipe,
    file_missing,
    file_of_another_checkpoint,
    file_over_another,
    file_renamed,
    file_with_a_terabyte_of_nothing,
    files_added,
    files_swapped,
    folder_is_something_else,
    folder_renamed,
    tensors_swapped,
)
from benchmarks.damage_kinds.in_values import (
    forged_giant,
    forged_header,
    forged_record,
    value_in_a_header,
    value_in_the_record,
)

KINDS: list[Damage] = [
    *(changing(change) for change in CHANGES),
    *[file_missing, file_empty, file_is_a_folder, file_is_a_link, file_is_a_pipe],
    *[file_with_a_terabyte_of_nothing, file_renamed, files_swapped, file_over_another],
    *[file_of_another_checkpoint, file_half_of_another_checkpoint, tensors_swapped, files_added],
    *[folder_renamed, folder_is_something_else],
    *[value_in_the_record] * 4,
    *[value_in_a_header] * 4,
    *[forged_record] * 4,
    *[forged_header] * 4,
    forged_giant,
]
