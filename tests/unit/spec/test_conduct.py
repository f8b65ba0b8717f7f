"""Rules about conduct, which no file can break, and the tests that hold the project to each."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from estream_spec.rulebook import RULES

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
CONDUCT = {
    "EMOE-EDT-001": ["unit/packer/test_editing.py::test_nothing_is_written_below_the_old_end_but_the_twins"],
    "EMOE-EDT-002": ["unit/packer/test_editing.py::test_lost_and_torn_writes"],
    "EMOE-EDT-003": [
        "unit/packer/test_editing.py::test_unknown_sections_are_kept",
        "unit/packer/test_compiling.py::test_sections_that_nobody_says_are_safe_to_copy_are_dropped",
        "property/test_edits.py::test_any_edits",
    ],
    "EMOE-EDT-004": ["unit/packer/test_editing.py::test_the_last_generation_is_not_passed"],
    "EMOE-EDT-005": ["unit/packer/test_editing.py::test_one_edit_at_a_time"],
    "EMOE-GRA-006": ["unit/runtime/test_backends.py::test_a_graph_of_another_interface_is_refused"],
    "EMOE-MAT-001": ["cli/test_match.py::test_nothing_but_the_header_is_read"],
    "EMOE-MAT-002": [
        "conformance/test_match_cases.py::test_the_matcher_gives_what_must_come_out",
        "conformance/test_match_cases.py::test_the_second_matcher_gives_what_must_come_out",
    ],
    "EMOE-NUM-001": ["unit/runtime/test_backends.py::test_signed_weights_are_used_only_where_they_are_exact"],
    "EMOE-NUM-002": ["unit/runtime/test_session.py::test_results_do_not_depend_on_arena_or_groups_or_policy"],
    "EMOE-NUM-003": [
        "unit/runtime/test_routing.py::test_a_score_that_is_not_finite_is_refused",
        "unit/runtime/test_session.py::test_numbers_that_overflow_are_named_with_their_layer",
    ],
    "EMOE-NUM-004": [
        "unit/runtime/test_htp_range.py::test_numbers_that_fp16_does_not_have_are_refused",
        "unit/runtime/npu/test_backend.py::"
        "test_keys_and_values_beyond_fp16_are_refused_before_anything_attends_to_them",
    ],
    "EMOE-RDR-001": ["unit/spec/test_limits.py::test_sums_and_products_of_legal_values_fit_64_bits"],
    "EMOE-RDR-002": ["unit/loader/test_source.py::test_trailing_bytes_are_ignored"],
    "EMOE-RDR-003": [
        "unit/runtime/test_background.py::test_no_result_is_given_before_the_embedding_is_proven",
        "unit/loader/test_dense.py::test_embedding_rows_that_were_others_before_the_proof",
        "unit/loader/test_dense.py::test_embedding_rows_that_change_after_they_were_proven",
    ],
    "EMOE-RDR-004": [
        "unit/spec/test_container.py::test_one_damaged",
        "unit/packer/test_editing.py::test_killed_at_every_write",
    ],
    "EMOE-RDR-005": ["unit/spec/test_container.py::test_unknown_sections_are_skipped"],
    "EMOE-RDR-006": ["unit/spec/test_manifest.py::test_manifest_survives_encoding"],
    "EMOE-RDR-007": [
        "unit/loader/test_pager.py::test_damaged_record_is_not_published",
        "unit/loader/test_pager.py::test_read_before_routing_it_harms_only_who_wants_it",
    ],
    "EMOE-RDR-008": ["unit/spec/test_limits.py::test_manifest_longer_than_its_limit"],
    "EMOE-RDR-009": ["unit/loader/test_package.py::test_opening_reads_superblocks_directory_and_manifest_only"],
    "EMOE-RDR-010": ["conformance/test_both_readers.py::test_both_readers_give_every_answer"],
    "EMOE-RDR-011": ["conformance/test_both_readers.py::test_both_readers_give_every_answer"],
    "EMOE-RDR-012": ["unit/loader/test_trust.py::test_unknown_algorithm_proves_nothing"],
    "EMOE-RDR-013": ["unit/loader/test_trust.py::test_nothing_but_the_directory_is_read_before"],
    "EMOE-RDR-014": ["unit/loader/test_trust.py::test_without_a_policy_no_signature_is_looked_at"],
    "EMOE-RDR-015": ["unit/spec/test_container.py::test_optional_features_and_minor_versions_are_ignored"],
    "EMOE-RDR-016": [
        "unit/loader/test_schedules.py::test_refused",
        "unit/runtime/test_programs.py::test_a_wrong_program_of_the_package_is_refused_before_anything_runs",
        "unit/runtime/test_programs.py::test_a_program_made_for_the_session_is_proven_too",
    ],
    "EMOE-RDR-017": [
        "unit/loader/test_package.py::test_a_binary_is_proven_before_it_is_given_away",
        "unit/runtime/test_htp_choice.py::test_a_binary_for_another_chip_is_refused",
        "unit/runtime/test_htp_choice.py::test_a_binary_of_a_newer_sdk_is_refused",
        "unit/runtime/test_htp_choice.py::test_a_damaged_binary_is_refused",
    ],
    "EMOE-WRI-001": ["unit/packer/test_writer.py::test_a_package_is_laid_out_as_the_format_says"],
    "EMOE-WRI-002": [
        "unit/packer/test_build.py::test_the_manifest_says_where_the_package_came_from_and_nothing_of_this_machine"
    ],
    "EMOE-WRI-003": ["unit/packer/test_graphs.py::test_a_graph_is_the_same_bytes_every_time_and_standard"],
    "EMOE-WRI-005": ["unit/packer/test_writer.py::test_only_what_compression_helps_is_compressed"],
    "EMOE-WRI-004": ["unit/packer/test_writer.py::test_a_package_is_laid_out_as_the_format_says"],
    "EMOE-WRI-006": [
        "unit/spec/test_binary_interface.py::test_names_and_shapes_are_those_of_the_text",
        "unit/runtime/npu/test_backend.py::test_a_row_is_the_same_whatever_stands_beside_it",
        "unit/runtime/npu/test_backend.py::test_hidden_keys_change_no_bit",
        "unit/runtime/npu/test_contents.py::test_a_binary_that_is_something_else_is_refused",
    ],
}


@cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the test functions in a file."""
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_rule_of_conduct_is_held_to_by_a_test() -> None:
    names = ("FORMAT.md", "SCHEDULE.md", "MATCHING.md")
    text = "".join((ROOT / "spec" / name).read_text(encoding="utf-8") for name in names)
    assert set(re.findall(r"\[(EMOE-[A-Z]{3}-\d{3})\]", text)) - set(RULES) == set(CONDUCT)


@pytest.mark.parametrize("rule", CONDUCT)
def test_the_tests_named_are_there(rule: str) -> None:
    for name in CONDUCT[rule]:
        path, _, function = name.partition("::")
        assert function in functions_of(path)
