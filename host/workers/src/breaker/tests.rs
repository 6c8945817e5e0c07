use super::*;

#[tokio::test(start_paused = true)]
async fn a_worker_s_breaker_opens_after_five_failures_and_a_success_ends_its_probation() {
    let breaker = Breaker::new(BreakerRules::WORKER);
    // Each failure is among many other calls.
    let calls = std::cell::Cell::new(0);
    let fail = || {
        breaker.record_failure(calls.replace(calls.get() + 100));
    };
    let pause = BreakerRules::WORKER.first_pause;
    (0..4).for_each(|_| fail());
    breaker.record_success(calls.get());
    (0..4).for_each(|_| fail());
    assert!(!breaker.is_paused());
    fail();
    assert!(breaker.is_paused());
    tokio::time::advance(pause).await;
    assert!(!breaker.is_paused());
    // On probation one failure is enough, and the pause is longer.
    fail();
    tokio::time::advance(pause).await;
    assert!(breaker.is_paused());
    tokio::time::advance(pause).await;
    assert!(!breaker.is_paused());
    breaker.record_success(calls.get());
    (0..4).for_each(|_| fail());
    assert!(!breaker.is_paused());
}

#[tokio::test(start_paused = true)]
async fn a_worker_s_breaker_lets_all_calls_through_on_probation_and_ignores_failures_while_paused() {
    let breaker = Breaker::new(BreakerRules::WORKER);
    for _ in 0..5 {
        breaker.record_failure(0);
    }
    assert!(!breaker.try_call());
    tokio::time::advance(BreakerRules::WORKER.first_pause / 2).await;
    breaker.record_failure(0);
    tokio::time::advance(BreakerRules::WORKER.first_pause / 2).await;
    assert!(breaker.try_call() && breaker.try_call(), "the failure within the pause did not extend it");
}

#[tokio::test(start_paused = true)]
async fn a_policy_s_breaker_opens_at_the_first_timeout_and_allows_one_trial_per_pause() {
    let breaker = Breaker::new(BreakerRules::POLICY);
    breaker.trip();
    assert!(breaker.is_paused() && !breaker.try_call());
    tokio::time::advance(BreakerRules::POLICY.first_pause).await;
    assert!(!breaker.is_paused() && breaker.is_open());
    assert!(breaker.try_call());
    assert!(!breaker.try_call(), "one trial only");
    breaker.record_success(0);
    assert!(!breaker.is_open() && breaker.try_call());
}

#[tokio::test(start_paused = true)]
async fn i4_failures_that_are_taken_back_are_not_among_those_in_a_row() {
    let new = || Breaker::new(BreakerRules { failure_rate: None, ..BreakerRules::WORKER });
    let breaker = new();
    let fail = |times: u32| (0..times).for_each(|_| _ = breaker.record_failure(0));
    for turn in 0..100 {
        fail(1);
        breaker.take_back(1, breaker.row());
        // I4.3
        assert!(!breaker.is_open(), "{turn}");
    }
    // I4.3: the fifth in a row opened it
    fail(5);
    assert!(breaker.is_open());
    breaker.take_back(1, breaker.row());
    assert!(!breaker.is_open());
    fail(1);
    assert!(breaker.is_open(), "the other four count");
    let row = breaker.row();
    breaker.record_success(0);
    fail(5);
    breaker.take_back(4, row);
    // I4.3
    assert!(breaker.is_open(), "a success ended the row of those that are taken back");
    let tripped = new();
    tripped.record_failure(0);
    tripped.trip();
    tripped.take_back(1, tripped.row());
    assert!(tripped.is_open(), "something else opened it");
}

#[tokio::test(start_paused = true)]
async fn i4_failures_that_are_taken_back_stay_in_the_rate() {
    let breaker = Breaker::new(BreakerRules::WORKER);
    for calls in 1..=10 {
        assert!(!breaker.is_open(), "{calls}");
        breaker.record_failure(calls);
        breaker.take_back(1, breaker.row());
    }
    // I4.3
    assert!(breaker.is_open(), "none of ten calls succeeded");
    breaker.take_back(10, breaker.row());
    assert!(breaker.is_open(), "the rate opened it");
}

#[tokio::test(start_paused = true)]
async fn t6_each_opening_and_each_closing_is_told_once() {
    let breaker = Breaker::new(BreakerRules::POLICY);
    let fail = || breaker.record_failure(0);
    // T6.1
    assert_eq!([fail(), fail(), fail(), fail(), fail(), fail()], [false, false, false, false, true, false]);
    tokio::time::advance(BreakerRules::POLICY.first_pause).await;
    assert!(breaker.try_call() && !fail() && !breaker.trip(), "it stayed open");
    assert!(breaker.record_success(0) && !breaker.record_success(0));
    assert!(breaker.trip());
}

/// Fails one of every `one_in` calls. Returns the number of calls made before the breaker opens, at most
/// 10,000.
fn opens_after(one_in: u64) -> Option<u64> {
    let breaker = Breaker::new(BreakerRules::POLICY);
    (1..=10_000_u64).find(|calls| {
        if calls % one_in == 0 {
            breaker.record_failure(*calls);
        } else {
            breaker.record_success(*calls);
        }
        breaker.is_open()
    })
}

#[test]
fn a_policy_s_breaker_opens_when_a_tenth_of_its_calls_fail_and_not_below() {
    assert_eq!(opens_after(1), Some(5));
    assert_eq!(opens_after(8), Some(64));
    assert_eq!(opens_after(10), Some(80));
    assert_eq!(opens_after(13), None);
}
