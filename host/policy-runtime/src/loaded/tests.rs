use std::{
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use pointsman_test_guests::LOW_QUEUE;

use super::*;
use crate::{capacity::Capacity, engine::Limits};

/// Reports which thread drops it.
struct Witness(mpsc::Sender<Option<String>>);

impl Drop for Witness {
    fn drop(&mut self) {
        let _ = self.0.send(thread::current().name().map(str::to_owned));
    }
}

#[test]
fn a_policy_s_instances_and_code_are_dropped_on_the_background_thread() {
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).expect("an engine");
    let compiled = compile(&engine, LOW_QUEUE, &Access::default()).expect("admitted");
    let (dropped, dropped_by) = mpsc::channel();
    let (witness, builder) = (Witness(dropped), engine.clone());
    let build = move || {
        let _ = &witness;
        let fresh = compiled.linked.instantiate(&builder, Arc::from("x"), &compiled.access);
        fresh.map_err(|refusal| refusal.to_string())
    };
    drop(Pool::new(&engine, Arc::from("x"), false, Box::new(build)).expect("instances"));
    let thread = dropped_by.recv_timeout(Duration::from_secs(10)).expect("it is dropped");
    assert_eq!(thread.as_deref(), Some("pointsman-chores"));
}

#[test]
fn t8_the_digest_of_settings_is_that_of_their_values() {
    let of = settings_digest;
    // T8.5
    assert_eq!(of(r#"{"a":{"c":1,"b":[2,1]},"d":"x"}"#), of(r#" { "d": "x", "a": {"b":[2, 1], "c": 1} } "#));
    assert_ne!(of(r#"{"a":[2,1]}"#), of(r#"{"a":[1,2]}"#));
    assert_eq!([of(""), of("{}"), of(" { } ")], [None; 3]);
    // T8.5: recordings of earlier versions have this one
    assert_eq!(of(r#"{"a":1}"#), Some(digest(br#"{"a":1}"#)));
}

#[test]
fn dropped_policies_leave_no_memory_behind() {
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).expect("an engine");
    let mut instances = 0;
    for turn in 0..20 {
        // A custom section that nothing reads makes each file different.
        let bytes = [LOW_QUEUE, &[0, 3, 1, b'x', turn]].concat();
        let policy = load(&engine, &bytes, Origin::Embedded, "{}").expect("admitted");
        instances = policy.pool.size() as u64;
        let (done, waits) = mpsc::channel();
        drop(policy);
        engine.later(move || {
            let _ = done.send(());
        });
        waits.recv().expect("the chores are done");
    }
    let metrics = engine.engine().pooling_allocator_metrics().expect("instances are pooled");
    let kept = u64::from(metrics.unused_warm_memories());
    // Those of one policy, and the two of its probe.
    assert!(kept <= instances + 2, "{kept} guest slots keep memory");
}

/// A pool of `engine` whose instances cannot be made while the flag is set, and the number of attempts.
fn failing_pool(engine: &PolicyEngine) -> (Arc<Pool>, Arc<AtomicBool>, Arc<AtomicUsize>) {
    let compiled = compile(engine, LOW_QUEUE, &Access::default()).expect("admitted");
    let (is_full, attempts) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (full, counted, builder) = (is_full.clone(), attempts.clone(), engine.clone());
    let build = move || {
        counted.fetch_add(1, Ordering::SeqCst);
        if full.load(Ordering::SeqCst) {
            return Err("the pool is full".to_owned());
        }
        let fresh = compiled.linked.instantiate(&builder, Arc::from("x"), &compiled.access);
        fresh.map_err(|refusal| refusal.to_string())
    };
    (Pool::new(engine, Arc::from("x"), false, Box::new(build)).expect("instances"), is_full, attempts)
}

fn poison(instance: &mut Instance) -> Result<(), Failure> {
    instance.poisoned = true;
    Ok(())
}

#[test]
fn a_shard_that_could_not_be_rebuilt_is_tried_again() {
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).expect("an engine");
    let (pool, is_full, _) = failing_pool(&engine);
    is_full.store(true, Ordering::SeqCst);
    while pool.call(poison).is_ok() {}
    is_full.store(false, Ordering::SeqCst);
    let begun = Instant::now();
    while pool.call(|_| Ok(())).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(20), "no instance came back");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn o7_calls_stop_making_instances_that_cannot_be_made() {
    let limits = Limits { rebuild_in_call: true, ..Limits::default() };
    let engine = PolicyEngine::new(limits, Capacity::detect()).expect("an engine");
    let (pool, is_full, attempts) = failing_pool(&engine);
    // A few failures are no end: each call tries again.
    is_full.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        let _ = pool.call(poison);
    }
    assert!(attempts.load(Ordering::SeqCst) > pool.size());
    is_full.store(false, Ordering::SeqCst);
    assert_eq!(pool.call(|_| Ok(())), Ok(()));
    is_full.store(true, Ordering::SeqCst);
    let before = attempts.load(Ordering::SeqCst);
    for _ in 0..200 {
        let _ = pool.call(poison);
    }
    // O7.6
    assert_eq!(attempts.load(Ordering::SeqCst) - before, 10);
    assert_eq!(pool.call(|_| Ok(())), Err(Failure::NotReady));
}
