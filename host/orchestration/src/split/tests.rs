use std::{cell::Cell, sync::Arc};

use pointsman_workers::{Worker, WorkerSpec};

use super::*;

fn candidates(flags: impl Iterator<Item = String>) -> Vec<Candidate> {
    let one = |(number, flag): (usize, String)| {
        let flag = format!("id={number},url=http://worker-{number}:1,{flag}");
        Arc::new(Worker::new(WorkerSpec::parse_flag(&flag).unwrap())).candidates().remove(0)
    };
    (1..).zip(flags).map(one).collect()
}

/// A pool in which every worker is described differently.
fn pool(role: &str, count: usize, engine: &str) -> Vec<Candidate> {
    candidates((0..count).map(|place| {
        format!("role={role},engine={engine},kv_compatibility={role}-{place},label.host=host-{place}")
    }))
}

/// The rows of the pair, and how many looks at candidates it took.
fn looked(prefill: &[Candidate], decode: &[Candidate]) -> (Option<(usize, usize)>, usize) {
    let looks = Cell::new(0);
    let found = first_pair(prefill, decode, |_| {
        looks.set(looks.get() + 1);
        true
    });
    let row = |pool: &[Candidate], found: &Candidate| {
        pool.iter().position(|candidate| std::ptr::eq(candidate, found)).unwrap()
    };
    (found.map(|(from, to)| (row(prefill, from), row(decode, to))), looks.get())
}

#[test]
fn workers_of_which_none_pair_are_looked_at_a_few_times_each() {
    for engine in ["vllm", "sglang"] {
        let (prefill, decode) = (pool("prefill", 2_000, engine), pool("decode", 2_000, engine));
        let (found, looks) = looked(&prefill, &decode);
        assert_eq!(found, None);
        assert!(looks <= 3 * 4_000, "{looks} looks");
    }
    // The last ones pair.
    let (mut prefill, mut decode) = (pool("prefill", 2_000, "vllm"), pool("decode", 2_000, "vllm"));
    prefill.extend(candidates(std::iter::once("role=prefill,engine=sglang".to_owned())));
    decode.extend(candidates(std::iter::once("role=decode,engine=sglang".to_owned())));
    let (found, looks) = looked(&prefill, &decode);
    assert_eq!(found, Some((2_000, 2_000)));
    assert!(looks <= 3 * 4_002, "{looks} looks");
}

#[test]
fn the_first_pair_is_that_of_a_search_through_all_pairs() {
    let kinds = [
        "engine=vllm",
        "engine=vllm,kv_compatibility=a",
        "engine=vllm,kv_compatibility=b",
        "engine=sglang",
        "engine=trtllm",
    ];
    let count = kinds.len();
    let pools = |role: &'static str, number: usize| {
        let places = [number % count, number / count % count, number / count / count];
        candidates(places.into_iter().map(move |place| format!("role={role},{}", kinds[place])))
    };
    let all = count.pow(3);
    let (prefill, decode): (Vec<_>, Vec<_>) =
        (0..all).map(|number| (pools("prefill", number), pools("decode", number))).unzip();
    for prefill in &prefill {
        for decode in &decode {
            let mut every = prefill
                .iter()
                .enumerate()
                .flat_map(|from| decode.iter().enumerate().map(move |to| (from, to)));
            let expected = every.find(|((_, from), (_, to))| from.worker.spec().pairs_with(to.worker.spec()));
            assert_eq!(looked(prefill, decode).0, expected.map(|((from, _), (to, _))| (from, to)));
        }
    }
}

#[test]
fn d4_a_pair_takes_over_with_workers_that_did_not_fail_if_there_is_another_way() {
    let registry = pointsman_workers::Registry::default();
    let add = |id: u64, role: &str| {
        let flag = format!("id={id},role={role},engine=vllm,url=http://worker-{id}:1,model=m");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap())
    };
    let takes_over = |tried: &[u64]| {
        let tried: Vec<_> =
            tried.iter().map(|id| (pointsman_workers::WorkerId(*id), pointsman_workers::DpRank(0))).collect();
        pair_may_take_over(&registry.snapshot(), &ModelName::new("m"), None, &tried)
    };
    let workers = [add(1, "prefill"), add(2, "decode")];
    for worker in &workers {
        worker.set_health(pointsman_workers::Health::Healthy);
    }
    // D4.9: the planned worker decodes if there is no other way
    assert_eq!((takes_over(&[]), takes_over(&[2])), (true, true));
    add(3, "aggregated").set_health(pointsman_workers::Health::Healthy);
    assert_eq!((takes_over(&[]), takes_over(&[2])), (true, false));
    add(4, "decode").set_health(pointsman_workers::Health::Healthy);
    assert!(takes_over(&[2]));
    workers[0].set_health(pointsman_workers::Health::Unhealthy);
    assert!(!takes_over(&[]));
}
