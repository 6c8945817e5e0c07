use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::*;
use crate::{InFlight, WorkerId, WorkerSpec, worker::Worker};

const SECOND: Duration = Duration::from_secs(1);
const STUCK_AFTER: Duration = Duration::from_secs(30);

fn worker() -> Arc<Worker> {
    Arc::new(Worker::new(WorkerSpec::parse_flag("role=aggregated,engine=vllm,url=http://a:1").unwrap()))
}

fn signs(prompt_tokens: Option<u64>) -> Option<EngineSigns> {
    let progress = EngineProgress { prompt_tokens, ..EngineProgress::default() };
    Some(EngineSigns { progress, kv_usage: None, kv_tokens: None, is_running: true })
}

/// Looks once a second, with a reading of `read` before each fifth look. Returns what the looks found.
async fn watch(
    worker: &Worker,
    seconds: u32,
    mut read: impl FnMut(u32) -> Option<EngineSigns>,
) -> Vec<Found> {
    let mut found = Vec::new();
    for second in 1..=seconds {
        tokio::time::advance(SECOND).await;
        if second % 5 == 0 {
            worker.note_signs(read(second));
        }
        found.push(worker.activity().look(Instant::now(), STUCK_AFTER));
    }
    found
}

fn stuck_by(found: &[Found]) -> Option<StuckBy> {
    found.last().unwrap().stuck.map(|stuck| stuck.by)
}

#[tokio::test(start_paused = true)]
async fn b7_a_worker_is_stuck_when_requests_wait_and_neither_bytes_nor_figures_move() {
    let worker = worker();
    // B7.1
    let idle = watch(&worker, 100, |_| signs(Some(7))).await;
    assert_eq!(stuck_by(&idle), None, "nothing waits for it");
    let call = InFlight::new(worker.clone(), None);
    let waits = watch(&worker, 45, |_| signs(Some(7))).await;
    let at = waits.iter().position(|found| found.stuck.is_some()).unwrap();
    assert!((29..=36).contains(&at), "{at}");
    assert_eq!(stuck_by(&waits), Some(StuckBy::Silence));
    // B7.4: it was asked first, and once at a time.
    let asked = waits.iter().position(|found| found.probe).unwrap();
    assert!((14..=16).contains(&asked) && waits.iter().filter(|found| found.probe).count() == 1, "{asked}");
    call.note_sign_of_life();
    assert_eq!(stuck_by(&watch(&worker, 1, |_| None).await), None, "a byte takes it back");
    drop(call);
    assert_eq!(worker.activity().waiting.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn b7_slow_workers_are_not_stuck() {
    // B7.2: a held-back tool call: tokens are generated, and no byte comes.
    let tool_call = worker();
    let call = InFlight::new(tool_call.clone(), None);
    assert_eq!(stuck_by(&watch(&tool_call, 300, |second| signs(Some(second.into()))).await), None);
    // A prefill of 300 s: only the use of the cache grows.
    let prefill = worker();
    let _call = InFlight::new(prefill.clone(), None);
    let grows =
        |second: u16| EngineSigns { kv_usage: Some(f32::from(second) / 300.0), ..signs(Some(1)).unwrap() };
    let usage = |second: u32| Some(grows(u16::try_from(second).unwrap()));
    assert_eq!(stuck_by(&watch(&prefill, 300, usage).await), None);
    // A long answer that is not streamed, beside requests that are answered.
    let whole = worker();
    let (_long, short) = (InFlight::new(whole.clone(), None), InFlight::new(whole.clone(), None));
    for _ in 0..30 {
        assert_eq!(stuck_by(&watch(&whole, 10, |_| signs(Some(1))).await), None);
        short.note_sign_of_life();
    }
    drop(call);
}

#[tokio::test(start_paused = true)]
async fn b7_without_figures_only_deadlines_of_three_requests_in_a_row_count() {
    for read in [None, signs(None)] {
        let worker = worker();
        let call = InFlight::new(worker.clone(), None);
        assert_eq!(stuck_by(&watch(&worker, 600, |_| read).await), None);
        // B7.3
        [1, 1, 1, 2, 2].into_iter().for_each(|request| worker.note_deadline(request));
        assert_eq!(stuck_by(&watch(&worker, 5, |_| read).await), None, "two requests");
        call.note_sign_of_life();
        watch(&worker, 1, |_| read).await;
        [3, 4].into_iter().for_each(|request| worker.note_deadline(request));
        assert_eq!(stuck_by(&watch(&worker, 5, |_| read).await), None, "a byte came between them");
        worker.note_deadline(5);
        assert_eq!(stuck_by(&watch(&worker, 5, |_| read).await), Some(StuckBy::Deadlines));
        worker.activity().probed(true);
        assert_eq!(stuck_by(&watch(&worker, 1, |_| read).await), None);
    }
    let told = worker();
    let _call = InFlight::new(told.clone(), None);
    watch(&told, 5, |_| signs(Some(1))).await;
    [1, 2, 3].into_iter().for_each(|request| told.note_deadline(request));
    assert_eq!(stuck_by(&watch(&told, 5, |_| signs(Some(1))).await), None, "its figures decide");
}

#[tokio::test(start_paused = true)]
async fn b7_a_silence_counts_only_as_far_as_a_reading_of_the_figures_confirms_it() {
    let worker = worker();
    let _call = InFlight::new(worker.clone(), None);
    worker.note_signs(signs(Some(1)));
    let unread = watch(&worker, 4, |_| None).await;
    assert!(unread.iter().all(|found| !found.read));
    for _ in 0..100 {
        tokio::time::advance(SECOND).await;
        let found = worker.activity().look(Instant::now(), STUCK_AFTER);
        assert_eq!(found.stuck, None, "no reading since");
    }
    assert!(worker.activity().look(Instant::now(), STUCK_AFTER).read, "it asks for one");
    worker.note_signs(signs(Some(1)));
    assert!(worker.activity().look(Instant::now(), STUCK_AFTER).stuck.is_some());
}

#[tokio::test(start_paused = true)]
async fn b7_a_call_counts_after_the_other_worker_s_part_and_not_while_nobody_reads() {
    let worker = worker();
    let other = CancellationToken::new();
    let mut call = InFlight::new(worker.clone(), Some(other.clone()));
    let waiting = || worker.activity().waiting.load(Ordering::Relaxed);
    assert_eq!(waiting(), 0);
    other.cancel();
    call.check();
    call.check();
    assert_eq!(waiting(), 1);
    call.pause();
    call.pause();
    assert_eq!(waiting(), 0);
    call.check();
    drop(call);
    assert_eq!(waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn b7_handoffs_that_do_not_finish_are_tried_again_after_a_pause_or_when_one_finishes() {
    let worker = worker();
    // B7.7
    [1, 2, 3].into_iter().for_each(|request| worker.note_handoff_late(request, WorkerId(9)));
    assert_eq!(stuck_by(&watch(&worker, 1, |_| signs(Some(1))).await), Some(StuckBy::Handoffs));
    worker.note_sign_of_life();
    assert_eq!(stuck_by(&watch(&worker, 1, |_| signs(Some(2))).await), Some(StuckBy::Handoffs));
    assert!(!worker.activity().probed(true), "a request without a handoff proves nothing");
    assert_eq!(stuck_by(&watch(&worker, 58, |_| signs(Some(3))).await), Some(StuckBy::Handoffs));
    tokio::time::advance(SECOND).await;
    assert!(worker.activity().probed(true));
    assert_eq!(stuck_by(&watch(&worker, 1, |_| signs(Some(3))).await), None);
    [1, 2].into_iter().for_each(|request| worker.note_handoff_late(request, WorkerId(9)));
    worker.note_handoff_done();
    worker.note_handoff_late(3, WorkerId(9));
    assert_eq!(stuck_by(&watch(&worker, 1, |_| signs(Some(3))).await), None);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_tells_only_that_requests_run_is_believed_for_a_stream() {
    let worker = worker();
    tokio::time::advance(100 * SECOND).await;
    assert!(worker.alive_at() < Instant::now());
    // I3.6: a share of the cache in use that stays the same tells nothing of a tool call that is held back
    for kv_usage in [None, Some(0.0), Some(0.25)] {
        for _ in 0..3 {
            tokio::time::advance(100 * SECOND).await;
            worker.note_signs(signs(None).map(|signs| EngineSigns { kv_usage, ..signs }));
            assert_eq!(worker.alive_at(), Instant::now(), "{kv_usage:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn i3_an_engine_that_counts_the_tokens_in_its_cache_works_when_they_move() {
    let of_cache = |kv_usage, kv_tokens| EngineSigns { kv_usage, kv_tokens, ..signs(None).unwrap() };
    for [first, later] in [
        [of_cache(Some(0.25), Some(700)), of_cache(Some(0.25), Some(740))],
        [of_cache(None, Some(700)), of_cache(None, Some(660))],
    ] {
        let worker = worker();
        let begun = worker.alive_at();
        for _ in 0..2 {
            tokio::time::advance(100 * SECOND).await;
            worker.note_signs(Some(first));
            // I3.6: the request that hangs is among those that run
            assert_eq!(worker.alive_at(), begun);
        }
        worker.note_signs(Some(later));
        // I3.6
        assert_eq!(worker.alive_at(), Instant::now());
    }
}

#[tokio::test(start_paused = true)]
async fn i3_an_engine_without_figures_works_while_it_answers_health_checks_and_is_not_stuck() {
    let (worker, figures) = (worker(), worker());
    figures.note_signs(signs(Some(1)));
    let begun = figures.works_at();
    tokio::time::advance(100 * SECOND).await;
    [&worker, &figures].iter().for_each(|worker| worker.activity().note_health(Instant::now()));
    // I3.6
    assert_eq!(worker.works_at(), Instant::now());
    // I3.6: figures tell more than an answered health check
    assert_eq!(figures.works_at(), begun);
    let _call = InFlight::new(worker.clone(), None);
    for request in 1..=3 {
        worker.note_deadline(request);
        worker.activity().note_health(Instant::now());
    }
    // B7.3: an answered health check is not progress
    assert_eq!(stuck_by(&watch(&worker, 1, |_| None).await), Some(StuckBy::Deadlines));
    let before = worker.works_at();
    worker.activity().note_health(Instant::now());
    // I3.6: the silent streams of an engine that is stuck end
    assert_eq!(worker.works_at(), before);
    assert!(before < Instant::now());
}
