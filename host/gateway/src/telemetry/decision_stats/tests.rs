use pointsman_routing::{NativeMode, Program, Slot, SlotSet};
use tokio::sync::mpsc;

use super::*;

fn stats() -> DecisionStats {
    let (events, _) = mpsc::unbounded_channel();
    let slot = |kind, model| Slot::new(kind, model, Program::Native(NativeMode::Kv), events.clone());
    let set = SlotSet::build(|kind| slot(kind, None));
    let own = std::sync::Arc::new(slot(SlotKind::Decode, Some(ModelName::new("own"))));
    DecisionStats::new(&Slots::new(set, [own]))
}

#[tokio::test(start_paused = true)]
async fn the_sum_covers_the_window_by_slot_and_lane() {
    let stats = stats();
    let (model, own) = (ModelName::new("m"), ModelName::new("own"));
    let times = [Some(Duration::from_millis(40)), None, Some(Duration::from_millis(900))];
    let served = Decided { agrees: Some(true), blocks: Some((10, 4)), times, ..Decided::default() };
    for minute in 0..90 {
        let by_fallback = minute % 2 == 0;
        stats.note(
            (&model, None),
            SlotKind::Decode,
            (Lane::Active, Generation(1)),
            &Decided { by_fallback, ..served },
        );
        stats.note((&own, None), SlotKind::Decode, (Lane::Active, Generation(1)), &Decided::default());
        tokio::time::advance(Duration::from_secs(60)).await;
    }
    let decode = |model: Option<&ModelName>, minutes| {
        let sum = stats.sum(model, SlotKind::Decode, (Lane::Active, None), minutes).0;
        (sum.count(Count::Decisions), sum.minutes.len())
    };
    // The current minute contains nothing.
    assert_eq!([decode(None, 60), decode(Some(&own), 60), decode(None, 5)], [(59, 60), (59, 60), (4, 5)]);
    let sum = stats.sum(None, SlotKind::Decode, (Lane::Active, None), 60).0;
    assert_eq!((sum.count(Count::Fallbacks), sum.count(Count::Sheds)), (29, 0));
    assert_eq!(sum.share(Count::Agreed, Count::Compared), Some(1.0));
    assert_eq!(sum.share(Count::CachedBlocks, Count::PromptBlocks), Some(0.4));
    let [ttft, itl, e2e] = sum.times();
    assert!(itl.is_none() && e2e.is_some_and(|e2e| e2e.count == 59));
    assert!(ttft.is_some_and(|ttft| (ttft.p90 / 40.0 - 1.0).abs() < 0.05 && ttft.cdf.len() == 1));
    assert_eq!((sum.minutes.first(), sum.minutes.last()), (Some(&1), Some(&0)));
    let nothing = stats.sum(None, SlotKind::Decode, (Lane::Shadow, None), 60).0;
    assert_eq!((nothing.count(Count::Decisions), nothing.share(Count::Agreed, Count::Compared)), (0, None));
    tokio::time::advance(Duration::from_secs(3_600)).await;
    assert_eq!(decode(None, 60).0, 0);
}

#[tokio::test(start_paused = true)]
async fn a_new_generation_begins_anew_and_late_requests_of_older_ones_do_not_count() {
    let stats = stats();
    let model = ModelName::new("m");
    let note = |generation, by_fallback| {
        let decided = Decided { by_fallback, ..Decided::default() };
        stats.note((&model, None), SlotKind::Decode, (Lane::Active, Generation(generation)), &decided);
    };
    let counts = || {
        let sum = stats.sum(None, SlotKind::Decode, (Lane::Active, None), 60).0;
        (sum.count(Count::Decisions), sum.count(Count::Fallbacks))
    };
    for _ in 0..2 {
        (0..5).for_each(|_| note(3, true));
        tokio::time::advance(Duration::from_secs(60)).await;
    }
    assert_eq!(counts(), (10, 10));
    note(4, false);
    note(3, true);
    // I9.4
    assert_eq!(counts(), (1, 0));
    let of = |runs: Option<u64>| {
        let lane = (Lane::Active, runs.map(Generation));
        let (sum, generation) = stats.sum(None, SlotKind::Decode, lane, 60);
        (sum.count(Count::Decisions), sum.minutes.len(), generation.map(|generation| generation.0))
    };
    // O1.13: the generation that runs now did not decide yet; and a lane that is empty now.
    assert_eq!([of(Some(4)), of(Some(5)), of(None)], [(1, 60, Some(4)), (0, 60, Some(5)), (1, 60, Some(4))]);
}
