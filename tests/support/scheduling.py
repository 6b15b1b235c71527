"""Which tests the workers of xdist take first: those that take longest, so that none of them begins when all else is done.

Left to itself, xdist gives each worker its part of the tests in the order of their files. The last tenth of a run then took as
long as its first half: long tests began when most workers had nothing left. Here each long test is handed out alone, the
longest first; then the other files, each to one worker, which makes the databases that its tests share once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pytest

LONGEST: tuple[str, ...] = (
    "tests/model/test_lease_protocol.py::test_no_interleaving_breaks_an_invariant_and_every_world_can_still_finish_its_job",
    "tests/acceptance/test_disk_full.py::test_on_a_full_disk_nothing_is_acknowledged_that_is_not_there_and_with_room_all_goes_on",
    "tests/chaos/test_chaos.py::test_no_invariant_breaks_when_other_parties_write_notify_lock_and_deploy",
    "tests/test_docs.py::test_the_pages_commands_do_what_the_page_says",
    "tests/chaos/test_chaos.py::test_no_invariant_breaks_when_workers_are_killed_stopped_and_cut_off_and_postgresql_crashes",
    "tests/testing/test_crash_points.py::test_a_process_is_killed_before_a_line",
    "tests/acceptance/test_payloads.py::test_large_jobs_over_a_slow_link_all_complete_in_their_first_attempt",
    "tests/acceptance/test_network_faults.py::test_without_its_listening_connection_a_worker_polls_says_so_and_listens_again",
    "tests/simulation/test_simulation.py::test_what_is_taken_away_is_noticed",
    "tests/testing/test_kit.py::test_without_a_server_of_yours_there_is_an_embedded_one_which_goes_with_the_run",
    "tests/acceptance/test_transactions.py::test_killed_at_every_await_in_turn_a_handlers_writes_and_its_completion_agree",
    "tests/acceptance/test_supervisor.py::test_the_children_of_a_killed_supervisor_stop_and_give_their_jobs_back",
    "tests/testing/test_kit.py::test_a_users_tests_pass_on_trio_on_asyncio_and_without_a_loop",
    "tests/model/test_lockstep.py::test_model_and_database_move_in_lockstep",
    "tests/acceptance/test_cancel.py::test_sigterm_under_load_loses_nothing_and_the_next_worker_goes_on_at_once",
    "tests/acceptance/test_limits.py::test_a_limit_of_three_holds_while_workers_are_killed_and_is_used_again_within_lease_and_tick",
    "tests/cli/test_commands.py::test_without_a_dsn_the_embedded_database_is_used_said_and_migrated",
    "tests/testing/test_run_job.py::test_on_a_clock_that_jumps_a_timeout_of_an_hour_takes_no_time",
    "tests/acceptance/test_payloads.py::test_a_result_that_the_network_does_not_take_fails_its_job_and_keeps_its_lease_until_then",
    "tests/acceptance/test_memory.py::test_small_jobs_go_on_behind_large_ones_that_memory_cannot_take_and_nothing_is_lost",
    "tests/acceptance/test_every_setting.py::test_a_setting_that_a_database_makes_for_its_sessions_bends_nothing",
    "tests/acceptance/test_process_faults.py::test_a_worker_starved_of_cpu_keeps_its_leases",
    "tests/cli/test_init.py::test_the_commands_it_names_lead_to_a_completed_job_and_a_test_that_passes",
    "tests/security/test_catalogue.py::test_each_role_does_all_that_its_rights_allow_and_changes_and_sees_what_the_page_says",
    "tests/test_docs.py::test_a_reader_may_go_on_from_the_page_by_awaiting_results_in_an_asyncio_program",
    "tests/acceptance/test_poison.py::test_a_job_that_kills_its_process_is_dead_and_its_neighbours_budget_is_untouched",
    "tests/acceptance/test_clock_faults.py::test_workers_whose_clocks_are_a_day_off_claim_keep_and_rescue_as_any_other",
    "tests/acceptance/test_cut_commits.py::test_a_job_is_completed_once_and_its_writes_are_there_once",
    "tests/acceptance/test_pgbouncer.py::test_a_pooler_that_is_killed_and_started_again_under_running_jobs_costs_no_job_and_doubles_none",
    "tests/acceptance/test_poison.py::test_suspects_start_soon_although_every_slot_of_every_worker_has_a_long_job",
    "tests/security/test_output.py::test_no_command_prints_what_a_terminal_obeys",
    "tests/testing/test_kit.py::test_a_message_shows_the_nearest_job_and_the_difference",
    "tests/acceptance/test_supervisor.py::test_a_child_that_gets_little_of_the_processor_is_not_replaced",
    "tests/simulation/test_simulation.py::test_no_plan_of_faults_breaks_an_invariant",
    "tests/acceptance/test_http.py::test_a_client_that_does_not_read_does_not_keep_the_worker_from_ending",
    "tests/acceptance/test_faults.py::test_a_worker_cut_off_ends_its_handlers_before_anyone_else_starts_them",
    "tests/acceptance/test_http.py::test_the_supervisor_says_which_process_is_blocked_or_drains",
    "tests/acceptance/test_reload.py::test_a_changed_file_takes_effect_after_the_running_jobs_have_ended",
    "tests/acceptance/test_promoted_standby.py::test_with_an_asynchronous_standby_what_it_had_not_received_is_lost_and_workers_go_on",
    "tests/client/test_payloads.py::test_enqueue_many_holds_a_few_megabytes_whatever_it_is_given",
    "tests/testing/test_kit.py::test_a_test_fails_whose_assertion_was_not_awaited",
    "tests/security/test_fuzz_rows.py::TestPlanted::test_whatever_is_planted_no_worker_ends_and_healthy_jobs_complete",
    "tests/testing/test_kit.py::test_arguments_are_compared_as_json_with_defaults_and_what_no_job_can_have_is_refused",
    "tests/acceptance/test_rolling_deploy.py::test_a_worker_of_the_version_before_and_a_new_one_share_the_work",
    "tests/client/test_payloads.py::test_jobs_list_lets_each_page_go_before_the_next",
    "tests/acceptance/test_http.py::test_one_address_answers_for_all_processes_and_counters_survive_a_killed_one",
    "tests/acceptance/test_poison.py::test_a_burst_waits_for_what_is_in_quarantine",
    "tests/acceptance/test_promoted_standby.py::test_with_a_synchronous_standby_nothing_acknowledged_is_lost_and_workers_go_on_by_themselves",
    "tests/acceptance/test_poison.py::test_what_runs_in_quarantine_is_given_back_when_the_worker_stops",
    "tests/acceptance/test_poison.py::test_a_job_whose_machine_is_switched_off_three_times_in_quarantine_is_not_dead",
    "tests/acceptance/test_poison.py::test_a_crash_in_a_process_that_had_run_another_suspect_does_not_count",
    "tests/testing/test_crash_points.py::test_a_handler_whose_job_always_comes_back_is_named",
    "tests/testing/test_kit.py::test_what_is_missing_is_named_within_seconds",
    "tests/acceptance/test_poison.py::test_a_worker_that_is_killed_takes_no_job_along_that_runs_in_quarantine",
    "tests/acceptance/test_supervisor.py::test_a_loop_that_a_handler_starves_is_noticed_the_handler_named_and_nobody_rescued",
    "tests/client/test_payloads.py::test_a_list_of_large_jobs_is_read_in_answers_of_a_few_megabytes",
    "tests/security/test_fuzz_rows.py::test_whatever_a_producer_calls_no_worker_ends_and_healthy_jobs_complete",
    "tests/acceptance/test_stacks.py::test_a_worker_that_cannot_answer_is_named_and_the_exit_code_is_1",
    "tests/acceptance/test_queue_leases.py::test_a_killed_workers_jobs_are_back_after_the_lease_of_their_queue",
    "tests/acceptance/test_disk_full.py::test_when_there_is_no_room_for_the_log_the_server_stops_and_what_it_acknowledged_is_there_afterwards",
    "tests/testing/test_crash_points.py::test_pytest_shows_the_point_even_where_a_tracer_is_at_work",
    "tests/acceptance/test_faults.py::test_the_jobs_of_a_killed_worker_run_again_within_lease_and_tick",
    "tests/acceptance/test_supervisor.py::test_a_killed_childs_jobs_are_handed_back_at_once_and_it_is_replaced",
    "tests/worker/test_hostile_objects.py::test_a_worker_outlives_what_its_handlers_raise",
    "tests/acceptance/test_supervisor.py::test_a_child_whose_loop_is_blocked_is_replaced",
    "tests/acceptance/test_supervisor.py::test_a_stopped_child_is_replaced_and_said_to_be_stopped",
    "tests/acceptance/test_standard_streams.py::test_a_worker_whose_log_nobody_reads_works_and_ends_well",
    "tests/acceptance/test_cron.py::test_each_occurrence_is_fired_once_while_workers_are_killed",
    "tests/acceptance/test_network_faults.py::test_with_latency_and_jitter_no_beat_is_skipped_and_no_lease_is_lost",
    "tests/acceptance/test_pgbouncer.py::test_clients_and_workers_work_through_it_by_polling",
    "tests/acceptance/test_poison.py::test_many_suspects_pass_one_after_another_through_few_processes",
    "tests/testing/test_faults_kit.py::test_a_server_crashes_and_restarts_with_what_was_committed",
    "tests/acceptance/test_poison.py::test_an_embedded_worker_that_was_told_where_its_handlers_are_does_the_same",
    "tests/testing/test_kit.py::test_a_forked_child_has_databases_of_its_own",
    "tests/acceptance/test_poison.py::test_a_handler_that_holds_the_loop_for_a_lease_is_killed_and_that_is_not_held_against_it",
    "tests/acceptance/test_http.py::test_a_worker_that_replaces_itself_serves_at_the_same_address",
    "tests/acceptance/test_poison.py::test_whichever_way_its_process_dies_a_job_is_dead_and_the_error_says_what_was_seen",
    "tests/acceptance/test_supervisor.py::test_a_child_that_keeps_the_interpreters_lock_is_replaced_and_the_handler_is_named",
    "tests/acceptance/test_traces.py::test_every_client_passes_the_trace_on",
    "tests/testing/test_faults_kit.py::test_a_killed_child_of_a_supervisor_is_replaced",
    "tests/acceptance/test_embedded.py::test_a_crashed_server_is_started_again",
    "tests/acceptance/test_supervisor.py::test_a_child_that_cannot_notice_its_supervisors_death_is_ended_by_its_alarm_clock",
    "tests/worker/test_kinds.py::test_the_timeout_of_a_job_that_waits_for_a_process_begins_with_its_handler",
    "tests/acceptance/test_supervisor.py::test_children_that_never_begin_are_given_up_after_a_few_tries",
    "tests/acceptance/test_poison.py::test_a_handler_that_cannot_be_cancelled_ends_with_its_process_and_its_job_is_cancelled",
    "tests/acceptance/test_reconnection.py::test_a_copy_that_takes_the_databases_place_knows_no_session_and_is_worked_on_all_the_same",
    "tests/acceptance/test_standard_streams.py::test_a_worker_whose_logs_reader_has_gone_works_and_ends_well",
    "tests/acceptance/test_supervisor.py::test_a_handler_that_does_not_end_is_settled_however_large_its_arguments",
    "tests/acceptance/test_standard_streams.py::test_a_worker_works_and_ends_well_whatever_its_streams_are",
    "tests/acceptance/test_supervisor.py::test_a_signal_in_a_processs_last_moments_is_no_error",
    "tests/acceptance/test_process_faults.py::test_after_a_pause_shorter_than_the_lease_less_the_margin_everything_goes_on",
    "tests/acceptance/test_payloads.py::test_a_failure_overtakes_large_results",
    "tests/acceptance/test_poison.py::test_nothing_else_runs_in_a_process_in_which_a_suspect_runs",
    "tests/model/test_lease_protocol.py::test_without_any_one_rule_a_counterexample_is_found",
    "tests/acceptance/test_reconnection.py::test_a_database_that_comes_late_is_waited_for",
    "tests/security/test_logins.py::test_a_worker_process_does_all_of_its_work",
    "tests/acceptance/test_pgbouncer.py::test_the_commands_work_through_it_and_doctor_says_what_it_means",
    "tests/acceptance/test_supervisor.py::test_a_child_killed_from_outside_is_said_to_be_out_of_memory_and_its_jobs_are_named",
    "tests/client/test_payloads.py::test_the_blocking_client_holds_a_few_megabytes_too",
    "tests/acceptance/test_faults.py::test_a_worker_stopped_past_its_lease_cancels_its_handler_when_it_goes_on",
)
"""The longest first: a test, with all its parameters, or each test of a file. What `make test ARGS=--durations=60` shows with
more than three seconds belongs here."""


def _ranks(longest: Iterable[str]) -> Mapping[str, int]:
    return {name: number for number, name in enumerate(longest)}


_RANKS = _ranks(LONGEST)


def rank(nodeid: str) -> int:
    """A test's place among the longest; behind them all if it is none of them."""
    test = nodeid.partition("[")[0]
    return _RANKS.get(test, _RANKS.get(file_of(test), len(_RANKS)))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def unit_of(nodeid: str) -> str:
    """What is handed out together with a test: nothing with a long one, else the rest of its file."""
    return nodeid if rank(nodeid) < len(_RANKS) else file_of(nodeid)


def longest_first(items: list[pytest.Item]) -> None:
    """Puts the long tests first, then the files with the most tests. The order within a file stays."""
    sizes: dict[str, int] = {}
    for item in items:
        sizes[unit_of(item.nodeid)] = sizes.get(unit_of(item.nodeid), 0) + 1
    items.sort(key=lambda item: (rank(item.nodeid), -sizes[unit_of(item.nodeid)], file_of(item.nodeid)))


class LongestFirst(LoadScopeScheduling):
    """Hands out what `longest_first` has put in order, to each worker that is almost done with what it has."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by size: what is handed out alone would come last

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
