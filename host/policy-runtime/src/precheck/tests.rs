use pointsman_test_bombs as bombs;
use pointsman_test_guests as guests;

use super::*;

const MEMORY: usize = 16 << 20;

fn outcome(bytes: &[u8]) -> String {
    match check(bytes, MEMORY) {
        Ok(()) => "fine".to_owned(),
        Err(Stopped::Malformed(text)) => format!("malformed: {text}"),
        Err(Stopped::Exceeded(refusal)) => refusal.to_string(),
    }
}

#[test]
fn every_bomb_is_refused_by_the_bound_that_it_exceeds() {
    let cases = [
        (bombs::nested_instance_types(2_000), "33 levels of nested types; the limit is 32"),
        (bombs::nested_lists(30_000), "20001 types; the limit is 20000"),
        (bombs::claims_4_gib(), "malformed: "),
        (bombs::claims_many_types(), "malformed: a type claims 4294967295 items in 0 bytes"),
        (bombs::doubling_instances(130), "instances; the limit is 500"),
        (bombs::nested_components(20_000), "17 levels of nested components; the limit is 16"),
        (bombs::many_locals(40_000, 7 << 20), "bytes in one function; the limit is 4194304"),
        (bombs::many_locals(40_000, 1 << 20), "40000 local variables in one function; the limit is 10000"),
        (bombs::many_locals(9_000, 1 << 20), "bytes times local variables in one function"),
        (bombs::nested_loops(100_000), "257 levels of nested loops; the limit is 256"),
        (bombs::nested_blocks(100_000), "50001 levels of nested blocks; the limit is 50000"),
        (bombs::memories(60, 1), "60 memories; the limit is 8"),
        (bombs::memories(2, 200), "26214400 bytes of declared memory; the limit is 16777216"),
        (bombs::many_tables(2, 15_000), "30000 elements of declared tables; the limit is 20000"),
    ];
    for (bytes, expected) in cases {
        let seen = outcome(&bytes);
        assert!(seen.contains(expected), "{seen}: expected {expected}");
    }
}

#[test]
fn a_bomb_in_wit_metadata_and_in_a_nested_module_is_found() {
    let policy = guests::LOW_QUEUE;
    let loops = bombs::nested_loops(1_000);
    assert!(outcome(&bombs::with_module(policy, &loops)).contains("nested loops"));
    let memory = bombs::memories(1, 1);
    assert!(outcome(&bombs::with_instances(policy, &memory, 600)).contains("instances; the limit is 500"));
    let types = bombs::nested_instance_types(2_000);
    let name = b"\x0ecomponent-type";
    let size = u8::try_from((name.len() + types.len()) & 0x7f).unwrap_or_default() | 0x80;
    let high = u8::try_from((name.len() + types.len()) >> 7).unwrap_or_default();
    let metadata = [guests::HOSTILE_CORE, &[0, size, high], name, &types].concat();
    assert!(outcome(&metadata).contains("nested types"), "{}", outcome(&metadata));
}

#[test]
fn real_policies_stay_below_every_bound() {
    let all = [
        guests::HOSTILE,
        guests::HOSTILE_CORE,
        guests::CHATTY,
        guests::ROGUE_LEARNER,
        guests::LEARNED_TTFT,
        guests::TENANT_LIMIT,
        pointsman_embedded_policies::KV_AWARE,
        pointsman_embedded_policies::CONDITIONAL_DISAGG,
    ];
    for bytes in all {
        assert_eq!(outcome(bytes), "fine");
    }
}

#[test]
fn every_truncation_and_every_changed_byte_ends_without_a_panic() {
    let policy = guests::LOW_QUEUE;
    for end in (0..policy.len()).step_by(997) {
        drop(check(policy.get(..end).unwrap_or_default(), MEMORY));
    }
    for place in (0..policy.len()).step_by(499) {
        for byte in [0, 0x7f, 0xff] {
            let mut changed = policy.to_vec();
            changed.iter_mut().skip(place).take(1).for_each(|to| *to = byte);
            drop(check(&changed, MEMORY));
        }
    }
}
