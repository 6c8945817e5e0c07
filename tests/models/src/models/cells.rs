//! One writer, two readers of a table. All keys share a home, and a value tells its key and how new it is.

use super::cells::Owner;
use crate::stand_in::{ArcSwap, sync::Arc};

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

/// The writer's steps, beside readers who look for keys one after another.
fn run(before: &[Step], steps: &'static [Step], looks: [&'static [u64]; 2]) {
    let mut owner = Owner::default();
    let published = Arc::new(ArcSwap::default());
    let step = |owner: &mut Owner, step: &Step| match *step {
        Set(key, number) => owner.set(key, value(key, number)),
        Remove(key) => owner.remove(key),
    };
    for one in before {
        step(&mut owner, one);
    }
    published.store(owner.cells().clone());
    let readers = looks.map(|looks| {
        let published = published.clone();
        loom::thread::spawn(move || {
            let mut newest = [0; 16];
            for key in looks {
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
        if step(&mut owner, one) {
            published.store(owner.cells().clone());
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

/// A key leaves, lends its cell to another, and comes back.
pub(crate) fn comes_back() {
    run(
        &[Set(A, 1), Set(STAYS, 1)],
        &[Remove(A), Set(B, 2), Remove(B), Set(A, 3)],
        [&[A], &[B]],
    );
}

/// The same where nothing lies behind: cells are emptied in between.
pub(crate) fn swept() {
    run(&[Set(STAYS, 1), Set(A, 1)], &[Remove(A), Set(B, 2), Remove(B), Set(A, 3)], [&[A], &[STAYS]]);
}

/// A key leaves before one that stays, and another takes its cell.
pub(crate) fn leaves() {
    run(&[Set(A, 1), Set(STAYS, 1)], &[Remove(A), Set(B, 2)], [&[STAYS], &[B, STAYS]]);
}

/// Values change in place.
pub(crate) fn changes() {
    run(&[Set(STAYS, 1), Set(A, 1)], &[Set(STAYS, 2), Set(A, 2), Set(STAYS, 3)], [&[STAYS, STAYS], &[A, STAYS]]);
}

/// The table is written anew, for there are too many, and the old cells are of no more use.
pub(crate) fn grows() {
    run(
        &[Set(A, 1), Set(STAYS, 1), Set(B, 1)],
        &[Set(C, 2), Remove(A), Set(D, 3), Set(STAYS, 4)],
        [&[A], &[D]],
    );
}

/// The last key leaves, and one comes into a table of no cells.
pub(crate) fn empties() {
    run(&[Set(A, 1)], &[Remove(A), Set(B, 2), Remove(B), Set(A, 3)], [&[A], &[B]]);
}
