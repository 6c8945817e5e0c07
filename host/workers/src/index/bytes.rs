//! What containers really take from the system's allocator, so that the byte budget is one of resident memory.

/// Bytes that an allocation of so many bytes takes: a header, steps of 16 bytes, and whole pages where it is large.
pub(super) const fn heap(bytes: usize) -> usize {
    const LARGE: usize = 128 * 1024;
    const PAGE: usize = 4_096;
    match bytes {
        0 => 0,
        1..=24 => 32,
        25..LARGE => (bytes + 8).next_multiple_of(16),
        _ => (bytes + 16).next_multiple_of(PAGE),
    }
}

/// Makes room for `more` items, and a quarter of those there are: doubling would take twice what is needed.
pub(super) fn room<T>(items: &mut Vec<T>, more: usize) {
    if items.capacity() - items.len() < more {
        items.reserve_exact(more.max(items.len() / 4));
    }
}

/// Gives back the room of items that left, once it is more than a quarter.
pub(super) fn fit<T>(items: &mut Vec<T>) {
    if items.capacity() > items.len() + items.len() / 4 + 4 {
        items.shrink_to_fit();
    }
}

/// The difference, for counters that go up and down.
pub(super) fn difference(after: usize, before: usize) -> i64 {
    i64::try_from(after).unwrap_or(i64::MAX) - i64::try_from(before).unwrap_or(i64::MAX)
}
