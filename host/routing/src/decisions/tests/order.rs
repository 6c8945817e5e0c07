//! Ids rise with time, whatever was locked.

use super::*;

#[test]
fn o1_after_a_shard_was_locked_ids_rise_with_time() {
    let (summary, mut recorder) = (summary(), Recorder::default());
    let decisions = Decisions::new(64, 1 << 20, Wants::default());
    let mut ids = Vec::new();
    // A reader holds each shard once, at some time of the first hundred decisions.
    for seed in 0..500 {
        let held = (seed < 100 && seed % 6 == 0).then(|| {
            let next = decisions.ticket.load(Ordering::Relaxed) as usize % decisions.shards.len();
            decisions.shards[next].ring.lock()
        });
        ids.push(put(&decisions, &summary, &mut recorder, seed, 5));
        drop(held);
    }
    // O1.25
    assert_eq!(ids.windows(2).find(|pair| pair[0] >= pair[1]), None);
    assert_eq!(decisions.newest(20), ids.iter().rev().take(20).copied().collect::<Vec<_>>());
    // Seventeen decisions found their shard locked. Each took one id more.
    assert_eq!(ids[499].0 - ids[0].0, 499 + 16);
}

#[test]
fn o1_after_writers_overtook_each_other_at_a_shard_ids_rise_with_time() {
    let (summary, mut recorder) = (summary(), Recorder::default());
    let decisions = Decisions::new(64, 1 << 20, Wants::default());
    let before = put(&decisions, &summary, &mut recorder, 0, 5);
    // A writer with the ticket of the next row was faster at the next shard.
    let count = decisions.shards.len() as u64;
    recorder.begin(&summary);
    recorder.end(Pool::empty(), None, &[], ["", "", ""]);
    decisions.shards[1].ring.lock().push(1, head(&summary, 1), recorder.recorded());
    let ids: Vec<_> = (2..100).map(|seed| put(&decisions, &summary, &mut recorder, seed, 5)).collect();
    // O1.25
    assert!(before < ids[0]);
    assert_eq!(ids.windows(2).find(|pair| pair[0] >= pair[1]), None);
    assert_eq!(ids[97].0 - before.0, 2 * count + 1 + 97);
}
