"""What happens when: each row of the page names the files of its tests, and these tests exist."""

from __future__ import annotations

import re
from functools import cache

from pages import PAGES, ROOT

TRIED: dict[str, str] = {
    "the computing process is killed": """
        fill::test_nothing_goes_wrong
        processes::test_a_killed_holder_holds_nobody_up
    """,
    "the computing process is killed ... on `disk://`": """
        disk_processes::test_killed_holder
    """,
    "the computing process is killed ... on `postgres://`": """
        postgres_processes::test_a_killed_holder_that_was_not_bound_holds_nobody_up
        processes::test_a_killed_holder_holds_nobody_up
    """,
    "the computing process is killed ... on `memcached://`": """
        memcached::test_times_are_whole_and_never_for_ever
        processes::test_a_killed_holder_holds_nobody_up
    """,
    "the computing process is frozen (SIGSTOP, a suspended container)": """
        keeper::test_a_frozen_holder_stores_nothing
        processes::test_a_frozen_holder_stores_nothing_late
    """,
    "a process with a local tier is frozen, and resumes": """
        frozen_process::test_what_was_invalidated_meanwhile_is_not_served
    """,
    "a process with a local tier is frozen, and resumes ... with its virtual machine (Redis, Postgres)": """
        frozen_process::test_a_server_of_which_nothing_was_heard_is_asked
    """,
    "a process is frozen during a write to `disk://`": """
        disk_processes::test_frozen_inside_a_write
    """,
    "the computation takes longer than its lease": """
        conformance::test_renew_moves_the_end
        memcached::test_a_lease_outlives_its_connection
        postgres_processes::test_a_renewed_lease_is_bound_to_the_connection_that_is_there
        processes::test_a_blocked_loop_keeps_its_lease
    """,
    "the computation takes longer than `max_hold`": """
        keeper::test_renewal_ends_after_max_hold
        processes::test_a_hung_holder_ends_with_max_hold
        processes::test_a_killed_holder_holds_nobody_up
    """,
    "a process forks": """
        fork::test_a_fork_inside_a_computation
        fork::test_workers_of_a_parent_that_has_used_the_cache
        memcached::test_a_forked_child_has_connections_of_its_own
        postgres_faults::test_a_child_holds_nothing_of_its_parents
        processes::test_a_child_leaves_its_parents_lease_alone
        processes::test_both_sides_of_a_fork_go_on
    """,
    "the engine is down": """
        faults::test_an_engine_in_trouble_is_no_outage
        outage::test_a_dead_engine_is_asked_once_a_second
        outage::test_a_directory_that_cannot_be_used_at_the_start
        outage::test_a_directory_that_disappears
        outage::test_calls_go_on
        outage::test_many_goes_on
    """,
    "the engine hangs": """
        disk_faults::test_locked_by_another_program
        hung_engines::test_calls_go_on_for_one_time_out
        memcached_faults::test_a_server_that_hangs_is_an_error_soon
        redis_faults::test_by_default_a_hung_engine_costs_a_second
    """,
    "the engine is slow": """
        faults::test_a_slow_engine_is_no_dead_one
        hung_engines::test_a_server_that_is_slow_is_no_server_that_hangs
    """,
    "the engine refuses connections or writes": """
        postgres_faults::test_a_server_that_lets_nobody_in_takes_no_longer_than_its_time
        postgres_faults::test_hits_go_on_where_nothing_may_be_written
        redis::test_a_server_that_reads_and_does_not_write
    """,
    "the engine goes down during a computation": """
        invalidated_before_a_crash::test_what_was_begun_before_a_server_died_is_kept_for_nobody
        outage::test_an_engine_that_goes_down_under_a_computation
    """,
    "`get`, `get_many` or `peek` while it is down": """
        outage::test_reads_go_on
    """,
    "`set`, `expire`, `invalidate`, `invalidate_all` or `clear` while it is down": """
        outage::test_changes_raise_and_yet_the_local_value_is_gone
        outage::test_invalidate_all_and_clear_raise_and_yet_local_values_are_gone
    """,
    "a lock while it is down": """
        outage::test_locks_are_never_open
    """,
    "`stats` or `key` while it is down": """
        redis_generations::test_key_and_stats_ask_nobody
    """,
    '`on_engine_error="raise"`': """
        outage::test_raise_is_for_those_who_want_it
    """,
    "the engine is down, and the function fails too": """
        invalidated_before_a_crash::test_what_was_computed_here_is_true_until_another_changes_it
        outage::test_engine_and_origin_both_down
        redis_faults::test_what_was_true_when_the_server_went_away
    """,
    "the engine is full": """
        disk_faults::test_bounded_by_bytes
        docs_servers::test_what_is_evicted_first
        memcached_faults::test_a_full_server_forgets_and_lies_not
        memcached_faults::test_a_lease_is_evicted_too
        postgres_sweep::test_it_is_as_large_as_it_may_be
    """,
    "a Redis that may evict nothing is full": """
        faults::test_an_engine_in_trouble_is_no_outage
        outage::test_what_a_full_engine_refuses_is_kept_for_a_moment_only
        redis::test_a_full_server_ends_what_it_began
        redis_faults::test_what_was_computed_in_trouble_holds_for_a_while
    """,
    "the file system of a `disk://` is smaller than `max_bytes`": """
        disk_faults::test_a_file_system_smaller_than_max_bytes
    """,
    "other programs have filled the disk": """
        disk_faults::test_no_room
        postgres_faults::test_a_full_disk_refuses_and_hits_go_on
    """,
    "one of several servers is down": """
        memcached_faults::test_the_rest_of_a_ring_goes_on
        memcached_faults::test_what_comes_back_with_its_values_is_asked_again
        outage::test_a_part_that_is_down_is_no_matter_of_the_other_parts
        redis_cluster::test_the_rest_of_a_cluster_goes_on
    """,
    "one of several servers is down ... and in a Redis cluster stores the generations": """
        redis_cluster::test_all_are_down_with_the_generations
    """,
    "another server takes over": """
        postgres_failover::test_a_lock_is_held_over_it
        postgres_failover::test_calls_go_on
        redis::test_a_replica_is_not_believed
        redis_cluster::test_a_replica_takes_over
        redis_sentinel::test_a_failover_while_a_value_is_computed
        redis_sentinel::test_a_replica_is_left
    """,
    "another server takes over ... before the old server has replicated its last changes": """
        etcd_faults::test_locks_outlive_the_leader
        redis_sentinel::test_a_failover_while_a_value_is_computed
    """,
    "the engine forgets values": """
        disk_faults::test_damaged_database
        disk_faults::test_removed_directory_is_made_again
        faults::test_a_server_that_forgets_at_every_step
    """,
    "the engine forgets a lease": """
        disk_faults::test_lease_of_a_removed_directory_is_lost
        memcached_faults::test_an_evicted_lease_is_lost
    """,
    "the engine forgets a lock": """
        faults::test_a_lock_that_was_forgotten_is_lost
        memcached::test_a_lock_is_released_only_by_its_owner
    """,
    "Redis restarts, and loads its values from disk": """
        redis_restart::test_a_snapshot_brings_nothing_back
    """,
    "Postgres crashes": """
        postgres_coherence::test_a_server_that_crashes
        postgres_failover::test_what_was_ended_does_not_come_back
    """,
    "a connection breaks, or a reply is lost": """
        faults::test_a_cut_at_every_step
        faults::test_half_a_reply_and_silence
        memcached::test_a_lease_outlives_its_connection
        postgres_faults::test_a_restart_is_nobodys_error
    """,
    "the reply that granted a lease is lost": """
        memcached_faults::test_a_fill_cut_at_every_byte_says_what_it_did
        outage::test_a_claim_whose_reply_is_lost_locks_nobody_out
    """,
    "the connection for notifications breaks (Redis, Postgres)": """
        postgres_news::test_a_connection_that_is_cut_without_a_word
        redis::test_losing_the_news_voids_all
        redis::test_waiters_are_woken_when_the_news_break
    """,
    "the clock of a machine that runs your processes": """
        docs_servers::test_memcached_counts_the_time_left
        promises_kept::test_time_left_counts_from_before_the_request
        redis::test_clocks_are_never_compared
    """,
    "the clock of a machine that runs your processes ... with `disk://`": """
        disk_faults::test_reboot
        disk_faults::test_steps_of_the_time_of_day
    """,
    "the clock of a Redis or Postgres server is set back": """
        postgres_clock::test_an_entry_is_kept_no_longer_than_it_was_given
        redis_clock::test_a_dead_holders_lease_is_no_longer_than_it_was
        redis_clock::test_an_entry_is_kept_no_longer_than_it_was_given
    """,
    "the clock of a Redis or Postgres server is set back ... is set forward": """
        postgres_clock::test_a_clock_that_is_set_forward_ends_things_early
        redis_clock::test_a_clock_that_is_set_forward_costs_no_second_value
    """,
    "the key is invalidated during a computation": """
        conformance::test_fill_after_invalidate_is_refused
        fill::test_nothing_goes_wrong
        processes::test_a_change_elsewhere_ends_a_computation
    """,
    "a call begins after `invalidate` has returned": """
        processes::test_random_interleavings
        promises_kept::test_who_calls_after_an_invalidation_elsewhere_is_given_nothing_older
    """,
    "a call begins after `invalidate` has returned ... after `invalidate_tags`, and the value carries such a tag": """
        tags::test_no_call_after_an_invalidation_gets_what_is_older
        tags::test_tags_that_only_the_computation_knows
        tags::test_what_carries_a_tag_goes
    """,
    "a call begins after `invalidate` has returned ... after `expire_tags`": """
        tags::test_a_soft_one_makes_it_stale
        tags::test_no_call_after_an_invalidation_gets_what_is_older
    """,
    "a tag of a value is invalidated while it is computed": """
        fill::test_nothing_goes_wrong
        tags::test_what_is_being_computed_is_not_stored
    """,
    "another process changes what is in a local tier, on `disk://`": """
        disk_coherence::test_no_reader_is_ever_behind
    """,
    "another process changes what is in a local tier, on `disk://` ... on Redis or Postgres": """
        postgres_coherence::test_a_killed_writer_leaves_no_tier_behind
        postgres_coherence::test_a_local_tier_follows_what_others_change
        processes::test_a_change_is_seen_by_hits_elsewhere
        redis::test_a_local_tier_follows
    """,
    "another process changes what is in a local tier, on `disk://` ... on a Redis service without notifications": """
        redis::test_no_tickets_where_nothing_is_tracked
        redis::test_without_rights
    """,
    "another process changes what is in a local tier, on `disk://` ... on memcached": """
        docs_servers::test_a_tier_before_memcached_follows_within_a_second
        memcached::test_generations_are_asked_for_once_a_second
    """,
    "another process calls `clear` or `invalidate_all`": """
        memcached::test_a_generation_is_believed_for_a_second
        redis::test_a_bump_is_pushed
    """,
    "another process calls `clear` or `invalidate_all` ... on `disk://`, Redis or Postgres, and a local tier "
    "has values of the function": """
        shared_costs::test_a_new_generation_costs_other_functions_nothing
    """,
    "another process calls `clear` or `invalidate_all` ... or `invalidate_tags`": """
        shared_costs::test_an_invalidated_tag_costs_others_nothing
    """,
    "another process calls `clear` or `invalidate_all` ... and then sets or invalidates a key": """
        ended_generations::test_nothing_older_than_a_change
        redis_generations::test_changes_go_to_a_generation_that_somebody_else_has_just_begun
    """,
    "a value cannot be stored": """
        codec::test_max_bytes_holds_both_ways
        disk_faults::test_larger_than_the_bound
        memcached_outage::test_a_value_that_is_too_large_is_told_and_given
        strict::test_it_is_served_and_not_kept
    """,
    "a value cannot be stored ... with `strict=True`, or with `set`": """
        strict::test_strictly_it_is_an_error
        strict::test_what_is_too_large_is_an_error_too
    """,
    "a value cannot be stored ... on `memory://`": """
        cached::test_values_are_the_very_objects
        strict::test_strictly_it_is_an_error
    """,
    "a deploy changes a return type": """
        codec_types::test_a_deploy_that_changes_a_type_is_a_miss
    """,
    "both versions of the application run": """
        rolling_deploy::test_each_version_computes_once
    """,
    "both versions of the application run ... and one version calls `invalidate`, `set` or `expire`": """
        rolling_deploy::test_a_change_by_either_version_concerns_both
    """,
    "both versions of the application run ... and the second version gets a hit": """
        rolling_deploy::test_after_the_deploy_the_new_version_takes_the_place
    """,
    "stored bytes are damaged or hostile": """
        codec_hostile::test_msgspec_bodies_refuse_what_is_not_of_the_type
        damaged_bytes::test_in_a_table
        damaged_bytes::test_on_redis
        memcached::test_foreign_bytes_are_a_miss
        postgres_news::test_what_strangers_say
        promises_kept::test_bytes_that_are_not_believed_are_a_miss_and_an_event
        signing::test_nobody_lengthens_a_life
    """,
    "stored bytes are damaged or hostile ... and the engine cannot tell the damage from no entry": """
        damaged_bytes::test_in_a_table
        damaged_bytes::test_on_memcached
    """,
    "stored bytes are damaged or hostile ... and the key has another type on Redis (a list)": """
        redis::test_what_is_no_entry_is_a_miss
    """,
    "the computation fails": """
        cached::test_an_error_reaches_the_caller_and_nothing_is_kept
        cached::test_followers_get_copies_of_the_error
    """,
    "the computation fails ... and callers in other processes wait": """
        conformance::test_verdict_answers_those_who_waited
        processes::test_a_failure_is_told_to_waiters_elsewhere
    """,
    "the computation fails ... with `stale=`": """
        cached::test_stale_is_served_when_the_computation_fails
    """,
    "the computation fails ... with `retry_after=`": """
        cached::test_retry_after_without_a_value
        conformance::test_a_rest_ends
    """,
    "a caller is cancelled": """
        cache::test_a_cancelled_crowd_leaves_nothing
        flight::test_a_cancelled_waiter_disturbs_nobody
        flight::test_a_computation_without_callers_is_cancelled_and_its_lease_released
        memcached_faults::test_a_cancelled_task_leaves_the_others_replies_alone
        processes::test_storms_of_cancellations
    """,
    "a time limit ends your function": """
        random_signals::test_an_exception_at_a_random_moment
        time_limits::test_a_computation_that_runs_out_of_time
    """,
    "Ctrl-C, an exit or a cancellation ends your function": """
        time_limits::test_an_interruption_of_the_function_is_the_caller_s
    """,
    "any other exception leaves your function": """
        time_limits::test_any_other_exception_is_the_function_s
    """,
    "a computation asks for its own key": """
        cached::test_recursion_is_an_error
    """,
    "two computations ask for each other's keys": """
        flight::test_two_computations_that_ask_for_each_other
    """,
    "two computations ask for each other's keys ... through threads of a plain pool": """
        flight::test_people_are_told_who_waits_for_whom
    """,
    "greenlets ask for one key, under gevent's patch": """
        greenlets::test_gevent
        greenlets::test_gevent_s_patch_after_the_first_use
    """,
    "greenlets ask for one key, under gevent's patch ... where a waiting greenlet would stop the thread": """
        greenlets::test_plain_greenlets
    """,
    "greenlets ask for one key, under gevent's patch ... under eventlet's patch": """
        greenlets::test_eventlet_is_refused
    """,
}
"""For each row of the page, the tests that try it, on every engine that the row concerns."""


PAGE = PAGES["what-happens-when.md"]


def _rows() -> list[list[str]]:
    """Return the cells of each case. A row that begins with "..." continues the case above it."""
    rows, case = [], ""
    for number in range(PAGE.text.count("| when | then | tried by |")):
        for when, *cells in PAGE.rows(number):
            case = case if when.startswith("...") else when
            rows.append([case if when == case else f"{case} {when}", *cells])
    return rows


def test_what_happens_when_was_tried() -> None:
    """Each row of the page has tests, and names their files."""
    assert [(when, files) for when, _, files in _rows()] == [(when, _files(tests)) for when, tests in TRIED.items()]


def test_a_case_is_read_at_a_glance() -> None:
    """No cell of the page is long. A long cell would hide several cases."""
    cells = [cell for line in PAGE.text.splitlines() if line.startswith("| ") for cell in line.split("|")]
    assert [cell for cell in cells if len(cell.split()) > 40] == []


def _files(tests: str) -> str:
    return ", ".join(f"`{each}`" for each in dict.fromkeys(test.partition("::")[0] for test in tests.split()))


def test_tests_of_what_happens_are_there() -> None:
    """Each test of the table exists. Otherwise the page would refer to tests that were renamed or removed."""
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
