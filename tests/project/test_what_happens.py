"""What happens when: each row of the page names where it was tried, and that is there."""

from __future__ import annotations

import re
from functools import cache

from pages import PAGES, ROOT

TRIED: dict[str, str] = {
    "the computing process is killed": """
        disk_processes::test_killed_holder
        fill::test_nothing_goes_wrong
        processes::test_a_killed_holder_holds_nobody_up
    """,
    "it is frozen": """
        keeper::test_a_frozen_holder_stores_nothing
        processes::test_a_frozen_holder_stores_nothing_late
    """,
    "the computation outlasts its lease, or hangs": """
        conformance::test_renew_moves_the_end
        keeper::test_renewal_ends_after_max_hold
        memcached::test_three_leases_long_is_never_robbed
        postgres_processes::test_a_renewed_lease_is_bound_to_the_connection_that_is_there
        processes::test_a_blocked_loop_keeps_its_lease
        processes::test_a_hung_holder_ends_with_max_hold
        processes::test_a_killed_holder_holds_nobody_up
    """,
    "the computation fails": """
        cached::test_stale_is_served_when_the_computation_fails
        conformance::test_a_rest_ends
        conformance::test_verdict_answers_those_who_waited
        processes::test_a_failure_is_told_to_waiters_elsewhere
    """,
    "the key is invalidated during a computation": """
        conformance::test_fill_after_invalidate_is_refused
        fill::test_nothing_goes_wrong
        processes::test_a_change_elsewhere_ends_a_computation
        processes::test_random_interleavings
    """,
    "another process changes what is in a local tier": """
        disk_coherence::test_no_reader_is_ever_behind
        docs_servers::test_a_tier_before_memcached_follows_within_a_second
        memcached::test_generations_are_asked_for_once_a_second
        postgres_coherence::test_a_killed_writer_leaves_no_tier_behind
        postgres_coherence::test_a_local_tier_follows_what_others_change
        processes::test_a_change_is_seen_by_hits_elsewhere
        redis::test_a_bump_is_pushed
        redis::test_a_local_tier_follows
        redis_generations::test_changes_go_to_a_generation_that_somebody_else_has_just_begun
    """,
    "the engine is down, hangs, or refuses us": """
        disk_faults::test_locked_by_another_program
        faults::test_a_slow_engine_is_no_dead_one
        faults::test_an_engine_in_trouble_is_no_outage
        hung_engines::test_calls_go_on_for_one_time_out
        memcached_faults::test_a_server_that_hangs_is_an_error_soon
        outage::test_a_dead_engine_is_asked_once_a_second
        outage::test_a_directory_that_cannot_be_used_at_the_start
        outage::test_a_directory_that_disappears
        outage::test_calls_go_on
        outage::test_locks_are_never_open
        postgres_faults::test_a_server_that_lets_nobody_in_takes_no_longer_than_its_time
        postgres_faults::test_hits_go_on_where_nothing_may_be_written
        redis_faults::test_by_default_a_hung_engine_costs_a_second
    """,
    "the engine is full": """
        disk_faults::test_a_file_system_smaller_than_max_bytes
        disk_faults::test_bounded_by_bytes
        disk_faults::test_no_room
        docs_servers::test_what_is_evicted_first
        faults::test_an_engine_in_trouble_is_no_outage
        memcached_faults::test_a_full_server_forgets_and_lies_not
        memcached_faults::test_a_lease_is_evicted_too
        outage::test_what_a_full_engine_refuses_is_kept_for_a_moment_only
        postgres_faults::test_a_full_disk_refuses_and_hits_go_on
        postgres_sweep::test_it_is_as_large_as_it_may_be
        redis::test_a_full_server_ends_what_it_began
        redis_faults::test_what_was_computed_in_trouble_holds_for_a_while
    """,
    "a value can't be kept": """
        codec::test_max_bytes_holds_both_ways
        disk_faults::test_larger_than_the_bound
        memcached_outage::test_a_value_that_is_too_large_is_told_and_given
    """,
    "one of several servers is down": """
        memcached_faults::test_the_rest_of_a_ring_goes_on
        memcached_faults::test_what_comes_back_with_its_values_is_asked_again
        outage::test_a_part_that_is_down_is_no_matter_of_the_other_parts
        redis_cluster::test_all_are_down_with_the_generations
        redis_cluster::test_the_rest_of_a_cluster_goes_on
    """,
    "another server takes over": """
        postgres_failover::test_a_lock_is_held_over_it
        postgres_failover::test_calls_go_on
        redis::test_a_replica_is_not_believed
        redis_cluster::test_a_replica_takes_over
        redis_sentinel::test_a_failover_while_a_value_is_computed
        redis_sentinel::test_a_replica_is_left
    """,
    "the engine forgets": """
        disk_faults::test_damaged_database
        disk_faults::test_lease_of_a_removed_directory_is_lost
        disk_faults::test_removed_directory_is_made_again
        faults::test_a_lock_that_was_forgotten_is_lost
        faults::test_a_server_that_forgets_at_every_step
        memcached::test_a_lock_is_released_only_by_its_owner
        memcached_faults::test_an_evicted_lease_is_lost
        postgres_coherence::test_a_server_that_crashes
        postgres_failover::test_what_was_ended_does_not_come_back
        redis_restart::test_a_snapshot_brings_nothing_back
    """,
    "a connection breaks, or a reply is lost": """
        faults::test_a_cut_at_every_step
        faults::test_half_a_reply_and_silence
        memcached::test_a_lease_outlives_its_connection
        memcached_faults::test_a_fill_cut_at_every_byte_says_what_it_did
        outage::test_a_claim_whose_reply_is_lost_locks_nobody_out
        postgres_faults::test_a_restart_is_nobodys_error
        postgres_news::test_a_connection_that_is_cut_without_a_word
        redis::test_losing_the_news_voids_all
        redis::test_waiters_are_woken_when_the_news_break
    """,
    "the wall clock steps": """
        disk_faults::test_reboot
        disk_faults::test_steps_of_the_time_of_day
        docs_servers::test_memcached_counts_the_time_left
        postgres_clock::test_a_clock_that_is_set_forward_ends_things_early
        postgres_clock::test_an_entry_is_kept_no_longer_than_it_was_given
        promises_kept::test_time_left_counts_from_before_the_request
        redis::test_clocks_are_never_compared
        redis_clock::test_a_dead_holders_lease_is_no_longer_than_it_was
        redis_clock::test_an_entry_is_kept_no_longer_than_it_was_given
    """,
    "a deploy changes a type": """
        codec_types::test_a_deploy_that_changes_a_type_is_a_miss
    """,
    "bytes in the engine are damaged or hostile": """
        codec_hostile::test_msgspec_bodies_refuse_what_is_not_of_the_type
        damaged_bytes::test_in_a_table
        damaged_bytes::test_on_redis
        memcached::test_foreign_bytes_are_a_miss
        postgres_news::test_what_strangers_say
        promises_kept::test_bytes_that_are_not_believed_are_a_miss_and_an_event
        redis::test_what_is_no_entry_is_a_miss
        signing::test_nobody_lengthens_a_life
    """,
    "a caller is cancelled": """
        cache::test_a_cancelled_crowd_leaves_nothing
        flight::test_a_cancelled_waiter_disturbs_nobody
        flight::test_a_computation_without_callers_is_cancelled_and_its_lease_released
        memcached_faults::test_a_cancelled_task_leaves_the_others_replies_alone
        processes::test_storms_of_cancellations
    """,
    "a time limit interrupts": """
        random_signals::test_an_exception_at_a_random_moment
        time_limits::test_a_computation_that_runs_out_of_time
    """,
    "a process forks": """
        fork::test_a_fork_inside_a_computation
        memcached::test_a_forked_child_has_connections_of_its_own
        postgres_faults::test_a_child_holds_nothing_of_its_parents
        processes::test_a_child_leaves_its_parents_lease_alone
        processes::test_both_sides_of_a_fork_go_on
    """,
    "a computation asks for its own key": """
        cached::test_recursion_is_an_error
        flight::test_two_computations_that_ask_for_each_other
    """,
    "several greenlets of a thread ask for one key": """
        greenlets::test_eventlet_is_refused
        greenlets::test_gevent
        greenlets::test_gevent_s_patch_after_the_first_use
        greenlets::test_plain_greenlets
    """,
}
"""For each row of that page, the tests that try it, on every engine that can come into it."""


def test_what_happens_when_was_tried() -> None:
    """The page would promise what was tried nowhere, or elsewhere than it says."""
    promised = [cells[0] for cells in PAGES["what-happens-when.md"].rows()]
    assert promised == list(TRIED)
    said = {cells[0]: cells[1] for cells in PAGES["what-happens-when.md"].rows(1)}
    assert said == {when: _files(tests) for when, tests in TRIED.items()}


def _files(tests: str) -> str:
    return ", ".join(f"`{each}`" for each in dict.fromkeys(test.partition("::")[0] for test in tests.split()))


def test_tests_of_what_happens_are_there() -> None:
    """The page would send its reader to a test that was renamed, or removed."""
    tests = {test for row in TRIED.values() for test in row.split()}
    assert sorted(test for test in tests if test.partition("::")[2] not in _defined(test.partition("::")[0])) == []


@cache
def _defined(file: str) -> set[str]:
    paths = [*(ROOT / "tests").rglob(f"test_{file}.py")]
    if file == "conformance":
        paths = [*(ROOT / "stampede" / "testing" / "conformance").glob("*.py")]
    return {
        name for path in paths for name in re.findall(r"^\s*(?:async )?def (\w+)\(", path.read_text(), re.MULTILINE)
    }
