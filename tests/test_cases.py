"""What users of pipeline-parallel training trip over, and the test that keeps each from happening here.

One line per known trap: what goes wrong elsewhere, and where the right behaviour is held; or the feature, still to
come, that it belongs to.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

GENERAL = "runtime/test_general.py"
RULES = "runtime/test_rules.py"
BACKWARD = "runtime/test_backward.py"
WATCHDOG = "runtime/test_watchdog.py"
LATER = "later: "

CASES: dict[str, tuple[str, str]] = {
    # Hangs, deadlocks, message order
    "1.1": ("sends cross and nobody posts the receive", "verify/test_verify.py::test_every_generator_runs"),
    "1.2": (
        "two ranks, both in send, then receive",
        "verify/test_verify.py::test_a_send_in_front_of_the_receive_that_the_other_side_waits_for",
    ),
    "1.3": ("head-of-line stalls", "simulate/test_replay.py::test_a_small_message_stalls_behind_a_large_one"),
    "1.4": ("fewer micro-batches than ranks", "simulate/test_published.py::test_fewer_microbatches_than_ranks"),
    "1.7": (
        "only one of several handles waited on",
        "runtime/test_pipeline.py::test_every_schedule_equals_the_plain_loop",
    ),
    "1.9": ("sides disagree on which gradients cross", f"{GENERAL}::test_floats_ints_flags_and_nothing_cross_together"),
    "1.11": ("sides disagree on dtypes", f"{GENERAL}::test_floats_ints_flags_and_nothing_cross_together"),
    "1.12": ("a bool mask, or a third tensor", f"{GENERAL}::test_floats_ints_flags_and_nothing_cross_together"),
    "1.13": ("evaluation entered by one rank only", f"{WATCHDOG}::test_evaluation_that_one_rank_enters_alone"),
    "1.14": (
        "norms reduced in local order",
        "runtime/test_optimizer.py::test_training_is_the_same_whatever_the_cut_and_the_schedule",
    ),
    "1.15": ("a cut that does not fit the schedule", f"{RULES}::test_bad_settings_are_named"),
    "1.16": ("stuck with little evidence", f"{WATCHDOG}::test_a_rank_that_is_busy_for_too_long"),
    "1.17": ("which rank did not join?", f"{WATCHDOG}::test_a_rank_that_dies_or_stops"),
    "1.18": ("messages that do not pair", "test_passes.py::test_transfers_are_what_crosses_ranks"),
    # Shapes
    "2.1": ("a batch that does not divide", f"{GENERAL}::test_a_batch_that_does_not_divide"),
    "2.2": ("buffers keep the first step's shape", f"{GENERAL}::test_lengths_may_change_between_steps_and_within_one"),
    "2.3": ("lengths differ within a step", f"{GENERAL}::test_lengths_may_change_between_steps_and_within_one"),
    "2.4": ("labels of another micro-batch", f"{GENERAL}::test_lengths_may_change_between_steps_and_within_one"),
    "2.6": ("variable length across stages", f"{GENERAL}::test_shapes_that_depend_on_data_need_a_word"),
    "2.7": ("shapes given by hand", f"{GENERAL}::test_floats_ints_flags_and_nothing_cross_together"),
    "2.9": ("a gradient that is None once", f"{GENERAL}::test_a_tensor_that_only_some_microbatches_use_gets_zeros"),
    # Arguments, masks, outputs, skips, views
    "3.1": ("one mask for all micro-batches", f"{GENERAL}::test_every_stage_gets_the_arguments_that_it_names"),
    "3.3": ("cut along the wrong axis", f"{GENERAL}::test_arguments_are_never_cut_by_guess"),
    "3.4": ("gradients asked of integers", "runtime/test_backward.py::test_embeddings"),
    "3.5": ("a boundary tensor without gradient", f"{GENERAL}::test_floats_ints_flags_and_nothing_cross_together"),
    "3.6": ("dict, dataclass, None at a boundary", f"{GENERAL}::test_floats_ints_flags_and_nothing_cross_together"),
    "3.9": ("skip connections", f"{GENERAL}::test_a_skip_over_stages"),
    "3.10": ("ready-made micro-batches", f"{GENERAL}::test_lengths_may_change_between_steps_and_within_one"),
    # Tied weights
    "4.1": ("copies drift", f"{GENERAL}::test_tied_weights_stay_equal_and_equal_one_process"),
    "4.3": ("a frozen tie", f"{GENERAL}::test_a_frozen_tie_has_no_gradient_to_sum"),
    # Layer split
    "5.1": ("layers lost", "runtime/test_layers.py::test_sizes_differ_by_one_at_most"),
    "5.2": ("layers doubled", "runtime/test_pipeline.py::test_every_schedule_equals_the_plain_loop"),
    "5.3": ("an empty stage", "plan/partition/test_solve.py::test_equal_layers_are_shared_out_evenly"),
    "5.5": (
        "heavy first and last stage",
        "plan/partition/test_solve.py::test_heavy_ends_get_fewer_layers",
    ),
    "5.7": ("a stage without parameters", f"{GENERAL}::test_stages_without_parameters"),
    # Loss scale
    "6.2": ("a raw sum is propagated", f"{RULES}::test_sum_and_count_divides_once_by_the_global_count"),
    "6.3": ("gradients grow with m", f"{RULES}::test_gradients_do_not_depend_on_the_number_of_microbatches"),
    "6.4": ("divided twice", f"{RULES}::test_gradients_do_not_depend_on_the_number_of_microbatches"),
    "6.6": ("an extra loss with local counts", f"{RULES}::test_sum_and_count_divides_once_by_the_global_count"),
    "6.7": ("only the last micro-batch counts", f"{RULES}::test_sum_and_count_divides_once_by_the_global_count"),
    "6.8": ("validation loss divided too", f"{RULES}::test_evaluation_touches_nothing_of_training"),
    "6.10": ("unexplained drift", "runtime/test_pipeline.py::test_every_schedule_equals_the_plain_loop"),
    # Activation checkpointing
    "8.1": (
        "recomputed activations outlive the step",
        "runtime/test_memory.py::test_recomputation_under_a_split_backward",
    ),
    "8.2": ("recomputed for I, and again for W", "runtime/test_memory.py::test_recomputation_under_a_split_backward"),
    "8.3": ("a checkpoint over integer inputs", "runtime/test_memory.py::test_recomputation_under_a_split_backward"),
    "8.4": ("what checkpointing buys, per pass", "test_docs.py::test_the_table_of_what_works_is_held_by_tests"),
    # torch.compile
    "9.2": ("set-up applied twice with two chunks", f"{BACKWARD}::test_layers_are_prepared_once"),
    "9.3": ("which features combine", "test_docs.py::test_the_table_of_what_works_is_held_by_tests"),
    # Clipping
    "12.1": ("norm of one stage", "runtime/test_optimizer.py::test_clipping_uses_the_norm_of_all_stages"),
    "12.2": ("clipping skipped with tensor parallelism", LATER + "tensor parallelism"),
    # Random numbers
    "13.1": ("dropout depends on the cut", f"{RULES}::test_dropout_and_initial_weights_do_not_depend_on_the_cut"),
    "13.3": ("router noise in recomputation", LATER + "mixture of experts"),
    "13.4": ("batch statistics depend on m", "runtime/test_layers.py::test_batch_statistics_get_a_word_of_warning"),
    # Evaluation
    "14.1": ("evaluation before training", f"{GENERAL}::test_training_and_evaluation_take_turns"),
    "14.2": ("other counts in evaluation", f"{GENERAL}::test_training_and_evaluation_take_turns"),
    "14.3": ("no evaluation at all", f"{GENERAL}::test_training_and_evaluation_take_turns"),
    # Metrics and messages
    "15.1": ("a made-up loss on rank 0", f"{GENERAL}::test_losses_and_outputs_where_they_are_asked_for"),
    "15.2": ("messages name internals", f"{RULES}::test_bad_settings_are_named"),
    "15.3": ("outputs and losses optional", f"{GENERAL}::test_losses_and_outputs_where_they_are_asked_for"),
    # Memory
    "16.1": (
        "sent activations live on",
        "runtime/test_memory.py::test_peak_memory_of_1f1b_does_not_grow_with_the_microbatches",
    ),
    "16.2": (
        "the last stage keeps outputs",
        "runtime/test_memory.py::test_peak_memory_of_1f1b_does_not_grow_with_the_microbatches",
    ),
    "16.4": (
        "more micro-batches, out of memory: explained",
        "runtime/test_memory.py::test_measured_bytes_are_the_simulated_ones",
    ),
    # Split backward
    "17.1": ("a weight at two places counts double", f"{BACKWARD}::test_a_weight_at_two_places_counts_once_each"),
    "17.3": (
        "weight gradients returned, never filled in",
        f"{BACKWARD}::test_the_gradients_that_w_makes_are_those_it_accumulates",
    ),
    "17.4": (
        "one stage, or no input gradient",
        f"{BACKWARD}::test_delayed_weight_gradients_equal_the_plain_loop",
    ),
    "17.5": ("V order on loop placement", "schedules/test_registry.py::test_a_schedule_owns_its_placement"),
    "17.6": ("another order of sums", "runtime/test_pipeline.py::test_every_schedule_equals_the_plain_loop"),
    "17.7": ("layers that no rule covers", f"{BACKWARD}::test_what_no_rule_covers_is_said_once"),
    # DualPipe
    "18.2": ("B means two things", "schedules/test_dualpipe.py::test_the_formulas_say_b_for_two_things"),
    "18.4": (
        "why p+1, and twice what",
        "schedules/test_dualpipe.py::test_every_rank_holds_one_activation_more_than_there_are_ranks",
    ),
    "18.5": ("is it better than interleaving?", "schedules/test_dualpipe.py::test_is_it_better_than_interleaving"),
    "18.6": (
        "one rank",
        "schedules/test_dualpipe_v.py::test_every_shape_is_valid_within_the_memory_it_claims",
    ),
    "18.7": ("is the overlap real?", "test_docs.py::test_the_page_says_whether_the_overlap_is_real"),
}


@pytest.mark.parametrize("number", CASES)
def test_every_case_is_held_by_a_test(number: str):
    trap, where = CASES[number]
    assert trap
    if where.startswith(LATER):
        return
    file, _, name = where.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name in functions
