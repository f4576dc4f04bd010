"""Where the answers differ, and why AIBrix 0.8.0's is wrong: all of it, by the name of its test."""

from __future__ import annotations

from typing import Final

DIFFERENCES: Final = {
    "hashes_equal_by_the_last": (
        "BlockHashes are equal when their last hash and their number are, so two prompts that end alike are one key."
    ),
    "content_hashes_ignore_their_prefix": (
        "A block hash is looked up without its prefix, so hashes that name content only give another prompt's KV."
    ),
    "a_key_forgets_where_it_was_cut": (
        "Keys compare prefix and query as one sequence: two keys of different blocks are equal."
    ),
    "keys_follow_the_callers_list": "Keys keep the caller's list and change when he reuses it.",
    "prefix_of_another_object": (
        "Prefix and query of tokens must be views of one object; two objects, as in AIBrix's own examples, raise."
    ),
    "joined_backwards": "A prefix that lies behind its query in one object is joined in the order of the object.",
    "arguments_dropped": "Arguments that fit no form of the call are ignored.",
    "a_suffix_is_found_as_the_head": (
        "In the second tier a view is keyed by how far it is from its own first token: KV of the prompt's head is "
        "given for its middle."
    ),
    "get_reports_what_it_did_not_copy": (
        "With a second tier, get() of a partial L1 hit counts the blocks of L1 and does not copy them."
    ),
    "a_hole_is_counted_as_a_hit": (
        "The file tier counts the blocks it could read, holes or not: memory that nothing was read into is delivered."
    ),
    "get_writes_behind_what_it_reports": "get() fills blocks behind a hole and reports a miss.",
    "more_room_than_the_query": "get() into a handle that is longer than the query fails with a second tier.",
    "short_queries_skip_the_second_tier": (
        "Fewer than four missing blocks are not looked for in the second tier, so they are stored and never found."
    ),
    "get_keeps_references": "get() takes a reference of each block in L1 and never gives it back: the memory is lost.",
    "a_second_release_frees_a_cached_block": (
        "A handle released twice gives the cache's own reference back; the next put overwrites the cached block."
    ),
    "tiers_disagree_after_a_second_put": (
        "A second put of a key replaces the block in L1 and leaves the old one in the second tier."
    ),
    "another_dtype_reads_the_same_bytes": "The dtype is not part of the identity: bfloat16 is delivered as float16.",
    "other_layers_read_the_same_bytes": "Only the first and the last layer and head are part of the identity.",
    "hashes_run_together": (
        "Hashes of a larger cache block are joined without a separator: ('ab', 'c') and ('a', 'bc') are one key."
    ),
    "damage_is_delivered": "Nothing is verified: a flipped bit on the medium is delivered.",
    "evicted_keys_are_kept": "Keys of evicted blocks are kept without bound (S3FIFO).",
    "the_last_chunk_is_not_announced": "cache_chunk_keys never names the last chunk as the next one.",
    "get_is_counted_in_blocks_of_blocks": "The tokens that get() delivered are counted block_ntokens times.",
    "calls_are_remembered_for_ever": "Metrics keep a number for each call until somebody resets them.",
    "closing_twice": "A second close() raises, and so does any call afterwards, with AttributeError.",
    "reserving_what_put_refuses": "allocate_for() accepts a prefix of broken blocks, which put() then refuses.",
}
