//! Heap memory of containers as the allocator counts it, so that the byte budget bounds resident memory.

/// Returns what an allocation of `bytes` takes: a header, steps of 16 bytes, and whole pages for large ones.
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

/// Reserves space for `more` items, growing by a quarter at least. Doubling would take up to twice what is
/// needed.
pub(super) fn reserve<T>(items: &mut Vec<T>, more: usize) {
    if items.capacity() - items.len() < more {
        items.reserve_exact(more.max(items.len() / 4));
    }
}

/// Frees unused capacity once it exceeds a quarter of the length.
pub(super) fn shrink<T>(items: &mut Vec<T>) {
    if items.capacity() > items.len() + items.len() / 4 + 4 {
        items.shrink_to_fit();
    }
}

/// Returns `after - before`, for counters that go up and down.
pub(super) fn difference(after: usize, before: usize) -> i64 {
    i64::try_from(after).unwrap_or(i64::MAX) - i64::try_from(before).unwrap_or(i64::MAX)
}
