use std::{collections::HashMap, sync::atomic::AtomicBool};

use proptest::prelude::*;
use tokio::time::{Duration, Instant};

use super::*;

proptest! {
    #[test]
    fn the_map_holds_what_a_std_map_holds(
        steps in proptest::collection::vec((0_u64..200, 0_u8..3), 1..2_000),
    ) {
        let (mut writer, mut model) = (MapWriter::default(), HashMap::new());
        for (number, (name, action)) in (0_u64..).zip(steps) {
            // Many keys share a home, and two have the hashes that mean "empty" and "tombstone".
            let hash = if name < 2 { name * 5 } else { Mixer::default().unmix(name << 32 | (name & 7) << 29) };
            if action == 0 {
                writer.remove(hash);
                model.remove(&hash);
            } else {
                writer.set(hash, number);
                model.insert(hash, number);
            }
            prop_assert_eq!(writer.get(hash), model.get(&hash).copied());
        }
        model.iter().for_each(|(hash, value)| assert_eq!(writer.get(*hash), Some(*value)));
        prop_assert_eq!(writer.entries().count(), model.len());
        model.keys().for_each(|hash| { writer.remove(*hash); });
        prop_assert_eq!((writer.held, writer.used, writer.bytes()), (0, 0, 0));
    }
}

/// A value contains its key, so a reader notices if it gets another key's value.
#[test]
fn readers_never_see_another_key_s_value() {
    let (published, done) = (arc_swap::ArcSwap::<LockfreeMap>::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let reader = || {
            let mut found = 0_u64;
            while !done.load(Relaxed) {
                for name in 1..400_u64 {
                    let hash = name.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    if let Some(value) = published.load().find(hash) {
                        assert_eq!(value & 0xffff_ffff, name);
                        found += 1;
                    }
                }
            }
            found
        };
        let readers = [scope.spawn(reader), scope.spawn(reader)];
        let (mut writer, mut state, start) = (MapWriter::default(), 1_u64, Instant::now());
        while start.elapsed() < Duration::from_millis(300) {
            for step in 0..1_000_u64 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let name = 1 + (state >> 33) % 399;
                let hash = name.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let rebuilt =
                    if step % 3 == 0 { writer.remove(hash) } else { writer.set(hash, step << 32 | name) };
                if rebuilt {
                    published.store(writer.map().clone());
                }
            }
        }
        done.store(true, Relaxed);
        assert!(readers.into_iter().all(|reader| reader.join().unwrap() > 0));
    });
}

#[test]
fn h4_keys_that_a_stranger_chose_do_not_share_a_home() {
    // Where the map used the lowest bits of a key as they are, all of these had one home.
    let keys = (1..=100_000_u64).map(|number| number << 32);
    let mut writer = MapWriter::default();
    keys.clone().for_each(|key| _ = writer.set(key, key));
    let home = |key| writer.map.home(key);
    let distance = |key: u64| match writer.map.search(key_of(key)) {
        Search::Held(at) => (at / WIDTH + writer.map.lines.len() - home(key)) % writer.map.lines.len(),
        _ => usize::MAX,
    };
    let longest = keys.map(distance).max().unwrap();
    // H4.4
    assert!(longest < 1_000, "a search passes {longest} lines");
}
