use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

const LIMITS: PoolLimits = PoolLimits { threads: 1, prompts: 4, bytes: 1_000, long_bytes: 100 };

/// Work that reports its name, or a refusal, and waits for a word of the test if it has a gate.
fn work(name: &'static str, told: &Sender<String>, gate: Option<Receiver<()>>) -> Work {
    let told = told.clone();
    Box::new(move |stopped| {
        let told_name = if stopped.is_ok() { name.to_owned() } else { format!("{name} refused") };
        told.send(told_name).unwrap();
        if let Some(gate) = gate {
            let _opened = gate.recv();
        }
    })
}

/// A pool whose only thread is busy until the sender is dropped, with its ticket.
fn busy(
    limits: PoolLimits,
    told: &Sender<String>,
    heard: &Receiver<String>,
) -> (EncodePool, Ticket, Sender<()>) {
    let pool = EncodePool::start(limits).unwrap();
    let (open, gate) = channel();
    let ticket = pool.submit(0, 10, work("first", told, Some(gate)));
    assert_eq!(heard.recv().unwrap(), "first");
    (pool, ticket, open)
}

#[test]
fn h7_a_flood_of_one_tenant_gives_way_to_others_and_is_bounded() {
    let (told, heard) = channel();
    let (pool, _first, open) = busy(LIMITS, &told, &heard);
    let flood: Vec<Ticket> = (0..10).map(|_| pool.submit(1, 10, work("flood", &told, None))).collect();
    assert_eq!((pool.waiting(), pool.prompts()), (3, 4));
    let other = pool.submit(2, 10, work("other", &told, None));
    assert_eq!((pool.waiting(), pool.prompts()), (3, 4));
    drop(open);
    let said: Vec<String> = heard.iter().take(11).collect();
    let count = |name: &str| said.iter().filter(|said| *said == name).count();
    // H7.4: seven find no place, and one gives way.
    assert_eq!((count("flood refused"), count("flood"), count("other")), (8, 2, 1));
    assert_eq!(said.iter().position(|said| said == "other"), Some(9), "behind one of the flood");
    let large = pool.submit(3, 1_001, work("large", &told, None));
    assert_eq!(heard.recv().unwrap(), "large refused");
    drop((flood, other, large));
}

#[test]
fn h7_prompts_give_way_only_if_that_makes_room() {
    let (told, heard) = channel();
    let (pool, _first, open) = busy(PoolLimits { prompts: 8, ..LIMITS }, &told, &heard);
    let small = [(); 2].map(|()| pool.submit(1, 10, work("small", &told, None)));
    let large = pool.submit(3, 900, work("large", &told, None));
    let refused = [100, 2_000].map(|bytes| pool.submit(2, bytes, work("other", &told, None)));
    let both = [heard.recv().unwrap(), heard.recv().unwrap()];
    // H7.4: one small prompt would not suffice.
    assert_eq!(both, ["other refused", "other refused"]);
    assert_eq!(pool.waiting(), 3);
    let other = pool.submit(2, 75, work("other", &told, None));
    assert_eq!(heard.recv().unwrap(), "small refused");
    drop(open);
    let mut said: Vec<String> = heard.iter().take(3).collect();
    said.sort_unstable();
    // H7.4
    assert_eq!(said, ["large", "other", "small"]);
    drop((small, large, refused, other));
}

#[test]
fn prompts_that_nothing_waits_for_leave_the_queue_or_are_stopped() {
    let (told, heard) = channel();
    let (pool, first, open) = busy(LIMITS, &told, &heard);
    let given_up = pool.submit(1, 900, work("given up", &told, None));
    let kept = pool.submit(1, 20, work("kept", &told, None));
    assert_eq!((pool.waiting(), pool.prompts()), (2, 3));
    drop(given_up);
    assert_eq!((pool.waiting(), pool.prompts()), (1, 2));
    let stopped = first.stopped.clone();
    assert!(!stopped.load(Relaxed));
    drop(first);
    assert!(stopped.load(Relaxed), "the encode that runs is told");
    drop(open);
    assert_eq!(heard.recv().unwrap(), "kept");
    drop((pool, kept));
    assert!(heard.recv_timeout(std::time::Duration::from_millis(20)).is_err());
}

#[test]
fn one_thread_is_left_to_prompts_that_are_not_long() {
    let (told, heard) = channel();
    let pool = EncodePool::start(PoolLimits { threads: 2, ..LIMITS }).unwrap();
    let (open, gate) = channel();
    let long = pool.submit(1, 101, work("long", &told, Some(gate)));
    assert_eq!(heard.recv().unwrap(), "long");
    let second = pool.submit(2, 101, work("second", &told, None));
    let short = pool.submit(3, 100, work("short", &told, None));
    assert_eq!(heard.recv().unwrap(), "short");
    assert_eq!(pool.waiting(), 1);
    drop(open);
    assert_eq!(heard.recv().unwrap(), "second");
    drop((long, second, short));
}

#[test]
fn a_panic_costs_its_own_prompt_only() {
    let (told, heard) = channel();
    let pool = EncodePool::start(LIMITS).unwrap();
    let (result, of_panic) = channel::<()>();
    let panics = pool.submit(
        1,
        101,
        Box::new(move |_| {
            let _dropped = result;
            panic!("as the test asks for");
        }),
    );
    assert!(of_panic.recv().is_err(), "whoever waits for it is told");
    let next = pool.submit(1, 101, work("next", &told, None));
    assert_eq!(heard.recv().unwrap(), "next");
    drop((panics, next));
}
