//! The lock-free map: one writer and two readers. All keys share a home. A value contains its key and a
//! number that rises.

use std::sync::Arc;

use super::lockfree_map::MapWriter;
use crate::loom_types::ArcSwap;

/// Keys that come and go, and one that stays.
const A: u64 = 11;
const B: u64 = 12;
const C: u64 = 13;
const D: u64 = 14;
const STAYS: u64 = 10;

#[derive(Clone, Copy)]
enum Step {
    Set(u64, u64),
    Remove(u64),
}

use Step::{Remove, Set};

fn value(key: u64, number: u64) -> u64 {
    key << 32 | number
}

/// Runs the writer's steps beside two readers, each of which looks up keys one after another.
fn run(before: &[Step], steps: &'static [Step], lookups: [&'static [u64]; 2]) {
    let mut writer = MapWriter::default();
    let published = Arc::new(ArcSwap::default());
    let step = |writer: &mut MapWriter, step: &Step| match *step {
        Set(key, number) => writer.set(key, value(key, number)),
        Remove(key) => writer.remove(key),
    };
    for one in before {
        step(&mut writer, one);
    }
    published.store(writer.map().clone());
    let readers = lookups.map(|lookups| {
        let published = published.clone();
        loom::thread::spawn(move || {
            let mut newest = [0; 16];
            for key in lookups {
                let found = published.load().find(*key);
                assert!(found.is_some() || *key != STAYS, "a key that is held was not found");
                let Some(found) = found else { continue };
                assert_eq!(found >> 32, *key, "another key's value");
                let number = found & 0xffff_ffff;
                let last = &mut newest[*key as usize];
                assert!(number >= *last, "an older value than before");
                *last = number;
            }
        })
    });
    for one in steps {
        if step(&mut writer, one) {
            published.store(writer.map().clone());
        }
    }
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    for key in [A, B, C, D, STAYS] {
        let last = before.iter().chain(steps).rev().find_map(|step| match *step {
            Set(of, number) if of == key => Some(Some(value(key, number))),
            Remove(of) if of == key => Some(None),
            _ => None,
        });
        assert_eq!(published.load().find(key), last.flatten(), "the last value");
    }
}

/// A key is removed, another key takes its cell and is removed, and the first comes back.
pub(crate) fn comes_back() {
    run(&[Set(A, 1), Set(STAYS, 1)], &[Remove(A), Set(B, 2), Remove(B), Set(A, 3)], [&[A], &[B]]);
}

/// The same with no key after them, so that cells are swept in between.
pub(crate) fn swept() {
    run(&[Set(STAYS, 1), Set(A, 1)], &[Remove(A), Set(B, 2), Remove(B), Set(A, 3)], [&[A], &[STAYS]]);
}

/// A key that lies before one that stays is removed, and another takes its cell.
pub(crate) fn leaves() {
    run(&[Set(A, 1), Set(STAYS, 1)], &[Remove(A), Set(B, 2)], [&[STAYS], &[B, STAYS]]);
}

/// Values change in place.
pub(crate) fn changes() {
    run(
        &[Set(STAYS, 1), Set(A, 1)],
        &[Set(STAYS, 2), Set(A, 2), Set(STAYS, 3)],
        [&[STAYS, STAYS], &[A, STAYS]],
    );
}

/// Too many keys: the map is rebuilt.
pub(crate) fn grows() {
    run(
        &[Set(A, 1), Set(STAYS, 1), Set(B, 1)],
        &[Set(C, 2), Remove(A), Set(D, 3), Set(STAYS, 4)],
        [&[A], &[D]],
    );
}

/// The last key is removed, and another is set in a map without cells.
pub(crate) fn empties() {
    run(&[Set(A, 1)], &[Remove(A), Set(B, 2), Remove(B), Set(A, 3)], [&[A], &[B]]);
}
